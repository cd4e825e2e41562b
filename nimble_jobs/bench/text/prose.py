"""English prose out of the docstrings of installed packages: real text, without a download.

Sources are parsed and never imported. Markup, code, tables and lists of parameters are left out.
"""

from __future__ import annotations

import ast
import inspect
import re
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

PYTHON = "python"  # stands for the standard library
PACKAGES = ("numpy", "networkx", "sympy", "torch", "sqlalchemy", PYTHON)  # all come with nimble-jobs
_LEAST_WORDS = 8
_ROLE = re.compile(r":[\w:.+-]+:`~?\.?([^`<]+?)(?:\s*<[^`>]*>)?`")  # :class:`~torch.nn.Linear`
_LINK = re.compile(r"`([^`<]+?)\s*<[^`>]*>`_{0,2}")
_CODE = re.compile(r">>>|::\s*$|^\s*[-=~^+|]{3,}|^\s*(\.\.|:\w+|@\w+|[-*+] |\[\d+\])|\\[a-z]+|[{}=$]|\w\(")
_SKIPPED = {"tests", "test", "_vendor", "testing", "site-packages", "lib2to3", "idlelib", "turtledemo"}


@dataclass(frozen=True, kw_only=True)
class Passage:
    """A paragraph of a docstring."""

    package: str
    name: str  # of the object that it documents: networkx.algorithms.dag.topological_sort
    text: str


def passages(package: str) -> Iterator[Passage]:
    """The paragraphs of a package's docstrings, in the order of its files, none twice; nothing if it is missing."""
    folder, seen = _folder(package), set[str]()
    if folder is None:
        return
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if _SKIPPED & set(parts[:-1]) or any(part.startswith("test_") for part in parts):
            continue
        inner = [part for part in parts if part != "__init__"]
        module = ".".join(inner if package == PYTHON else [package, *inner])
        for name, docstring in _docstrings(path, module):
            for paragraph in docstring.split("\n\n"):
                text = plain(paragraph)
                if text is not None and text not in seen:
                    seen.add(text)
                    yield Passage(package=package, name=name, text=text)


def plain(paragraph: str) -> str | None:
    """A paragraph on one line without its markup; None for what is no prose: code, tables, lists, short lines."""
    text = _LINK.sub(r"\1", _ROLE.sub(lambda match: match[1].rsplit(".", 1)[-1], paragraph))
    lines = textwrap.dedent(text.replace("`", "").replace("**", "")).strip("\n").splitlines()
    if any(_CODE.search(line) or line[:1].isspace() for line in lines):  # indented: the description of a parameter
        return None
    text = " ".join(" ".join(lines).split())
    letters = sum(letter.isalpha() or letter == " " for letter in text)
    is_prose = text[:1].isupper() and text.endswith((".", "!", "?")) and letters >= 0.92 * len(text)
    return text if is_prose and len(text.split()) >= _LEAST_WORDS else None


def _folder(package: str) -> Path | None:
    if package == PYTHON:
        return Path(sysconfig.get_path("stdlib"))
    spec = find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _docstrings(path: Path, module: str) -> Iterator[tuple[str, str]]:
    """Dotted name and docstring of a module, its classes and functions. Nothing for a file that does not parse."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about escapes in other people's strings
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    waiting: list[tuple[str, ast.AST]] = [(module, tree)]
    while waiting:
        name, node = waiting.pop(0)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found = ast.get_docstring(node, clean=False)
            if found:
                yield name, inspect.cleandoc(found)
            inner = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            children = [child for child in node.body if isinstance(child, inner)]
            waiting += [(f"{name}.{child.name}", child) for child in children if not child.name.startswith("_")]
