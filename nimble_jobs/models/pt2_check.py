"""Which exported programs can be loaded as data.

torch's loader trusts its file: it unpickles payloads that say so and, after a failure, sample inputs; it resolves
operator names by attribute look-up anywhere in torch; it evaluates size expressions and guards as Python; it pastes
names into generated code; it opens compiled libraries. A file counts as data only if it has none of these beyond what
`torch.export.save` writes for tensors and operators of known libraries. Whatever is not recognised is code.
"""

from __future__ import annotations

import ast
import builtins
import io
import json
import re
import zipfile
from collections.abc import Iterator
from typing import IO, Any

import torch

_MEMBERS = re.compile(
    r"(data/(weights|constants)/(weight_|tensor_)\d+"
    r"|data/(weights|constants)/model_(weights|constants)_config\.json"
    r"|data/sample_inputs/model\.pt|models/model\.json"
    r"|extra/.*|archive_format|archive_version|byteorder"
    r"|\.data/(version|serialization_id)|\.format_version|\.storage_alignment)"
)
_NAME = re.compile(r"[A-Za-z0-9_.]*")
_TREE = re.compile(
    r"""([\w .,:\[\]{}"-]|\\["\\])*""", re.ASCII
)  # JSON in JSON: only quotes and backslashes are escaped
_TEXT = frozenset({"metadata", "torch_version", "as_string", "as_strings"})  # never evaluated, never pasted into code
_OPERATOR = re.compile(
    r"torch\.ops\.(aten|prims|torchvision)\.(?!from_file\b)\w+\.\w+"
    r"|torch\.ops\.higher_order\.(wrap_with_set_grad_enabled|wrap_with_autocast|cond)"
    r"|_operator\.(getitem|add|sub|mul|floordiv|truediv|mod|neg|pow|eq|ne|lt|le|gt|ge|and_|or_)"
    r"|torch\.sym_(int|float|max|min|not|sum|sqrt)|math\.(ceil|floor|trunc)"
)
_FUNCTIONS = frozenset(
    """
    Max Min Mod PythonMod FloorDiv CleanDiv CeilDiv ModularIndexing IntTrueDiv FloatTrueDiv TruncToInt FloorToInt
    CeilToInt RoundToInt RoundDecimal ToFloat PowByNatural FloatPow Pow Eq Ne Lt Le Gt Ge And Or Not Identity Where
    Integer Rational Float Symbol Add Mul Equality Unequality StrictLessThan LessThan StrictGreaterThan GreaterThan
    floor ceiling Abs
    """.split()  # noqa: SIM905  # a list literal would take forty lines
)
_GUARD_ATTRIBUTES = frozenset({"size", "stride", "storage_offset", "ndim", "shape"})
_EXPRESSION = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Constant, ast.Name, ast.Call, ast.keyword,
    ast.Attribute, ast.Subscript, ast.Load, ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip


def why_code(file: IO[bytes]) -> str | None:
    """What makes the program in the file more than data, or None. Raises zipfile.BadZipFile, KeyError or ValueError
    for something that is no exported program.
    """
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        roots = {name.partition("/")[0] for name in names}
        if len(roots) != 1 or len(set(names)) != len(names):
            return "it is not one archive"
        root = roots.pop()
        strange = [n for n in names if not _MEMBERS.fullmatch(n.removeprefix(f"{root}/"))]
        if strange:
            return f"it holds {strange[0]}"
        for kind in ("weights", "constants"):
            config = json.loads(archive.read(f"{root}/data/{kind}/model_{kind}_config.json"))
            pickled = [n for n, payload in config["config"].items() if payload["use_pickle"]]
            if pickled:
                return f"it holds the pickled object {pickled[0]}"
        samples = archive.read(f"{root}/data/sample_inputs/model.pt")
        program = json.loads(archive.read(f"{root}/models/model.json"))
    if samples and not _plain_pickle(samples):
        return "its sample inputs are more than tensors"
    return next(_suspicions(program), None)


def _plain_pickle(data: bytes) -> bool:
    try:
        torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception:  # noqa: BLE001  # whatever a damaged or hostile pickle raises, it is not plain
        return False
    return True


def _suspicions(program: dict[str, Any]) -> Iterator[str]:
    for key, text in _strings(program):
        match key:
            case "guards_code":
                good = _harmless(text, guard=True)
            case "expr_str":
                good = _harmless(text, guard=False)
            case "target" | "as_operator":
                good = _OPERATOR.fullmatch(text) is not None
            case "in_spec" | "out_spec":
                good = _TREE.fullmatch(text) is not None
            case _:
                good = _NAME.fullmatch(text) is not None
        if not good:
            yield f"its {key} {text[:80]!r} is not one that is known to be harmless"


def _strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text at any depth, with the key that it lies under; keys are texts too."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for inner_key, inner in value.items():
            yield "key", inner_key
            if inner_key not in _TEXT:
                yield from _strings(inner, inner_key)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner, key)


def _harmless(text: str, *, guard: bool) -> bool:
    """Arithmetic over sizes, in Python or as sympy writes it: `Symbol('s0', integer=True)`.

    A guard also reads the sizes of inputs, as in `L['x'].size()[0] == 3`.
    """
    try:
        nodes = list(ast.walk(ast.parse(text, mode="eval")))
    except (SyntaxError, ValueError, RecursionError):
        return False
    return all(isinstance(n, _EXPRESSION) and _harmless_node(n, guard) for n in nodes)


def _harmless_node(node: ast.AST, guard: bool) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name)):
            return name in _FUNCTIONS
        case ast.Call(func=ast.Attribute(), keywords=[]):
            return guard
        case ast.Call():
            return False
        case ast.Attribute(attr=attr):
            return guard and attr in _GUARD_ATTRIBUTES
        case ast.Name(id=name):
            return not name.startswith("__") and not hasattr(builtins, name)
        case ast.Constant(value=value):
            return isinstance(value, int | float) or (isinstance(value, str) and bool(_NAME.fullmatch(value)))
        case ast.Subscript():
            return guard
        case _:
            return True
