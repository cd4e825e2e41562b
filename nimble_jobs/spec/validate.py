"""Validates the types of a tree's values with pydantic, and turns its errors into our problems.

A problem in one field must not hide one in another. So wrong values are taken out and the rest is validated again,
until there is a value for the rules to check. `Tree.bad` says which of its fields are stand-ins.
"""

from __future__ import annotations

import copy
import difflib
import json
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from nimble_jobs.spec.tree import Tree, Where
from nimble_jobs.spec.units import BadValue, wrong

Model = TypeVar("Model", bound=BaseModel)

_EXPECTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "finite_number": "a finite number",
    "model_type": "a mapping",
    "dict_type": "a mapping",
    "tuple_type": "a list",
    "string_too_short": "text that is not empty",
    "too_short": "at least one item",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:.15g}",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:.15g}",
}


def validate(tree: Tree, model: type[Model], base: Path) -> Model | None:
    """Report wrong types in `tree.value`. Returns the `model`, with stand-ins at the places in `tree.bad`, or None.

    Relative paths are relative to `base`.
    """
    value = copy.deepcopy(tree.value)
    for round_ in range(8):  # each round fills one level of missing fields; the spec is less deep
        try:
            return model.model_validate_json(json.dumps(value), context={"base": base})
        except ValidationError as e:
            for error in e.errors(include_url=False):
                where = error["loc"]
                # A list whose items are all wrong counts as empty: its items say enough.
                emptied = error["type"] == "too_short" and any(bad[: len(where)] == where for bad in tree.bad)
                if round_ == 0 and not emptied and not any(where[: len(bad)] == bad for bad in tree.bad):
                    _report(tree, model, error)
                if error["type"] != "extra_forbidden":
                    tree.bad.add(where)
                _repair(value, model, error)
    return None


def _report(tree: Tree, model: type[BaseModel], error: ErrorDetails) -> None:
    where, kind, context = error["loc"], error["type"], error.get("ctx", {})
    problem, expected = wrong(error["input"]), _EXPECTED.get(kind, "").format(**context)
    if kind == "missing":
        description = _fields(model, where[:-1])[str(where[-1])].description or ""
        problem, expected = "missing", description[:1].lower() + description[1:].rstrip(".")
    elif kind == "extra_forbidden":
        problem, expected = _unknown(model, where)
    elif kind == "literal_error":
        expected = str(context["expected"]).replace("'", "")
    elif isinstance(reason := context.get("error"), BadValue):
        problem, expected = reason.problem, reason.expected
    elif kind == "string_type" and isinstance(error["input"], bool | int | float):
        expected = "text, in quotes"
    elif kind == "too_short":
        problem = "found an empty list"
    tree.report(where, problem, expected)


def _repair(value: Any, model: type[BaseModel], error: ErrorDetails) -> None:
    """Take the wrong value out, or put in a stand-in for a missing one."""
    where = error["loc"]
    # Take out the whole list, because removing one item would shift the others.
    names = [str(part) for part in where[: next((i for i, p in enumerate(where) if isinstance(p, int)), len(where))]]
    for name in names[:-1]:
        value = value[name]
    if error["type"] == "missing":
        examples = _fields(model, where[:-1])[names[-1]].examples
        value[names[-1]] = examples[0] if examples else {}
    else:
        value.pop(names[-1], None)


def _unknown(model: type[BaseModel], where: Where) -> tuple[str, str]:
    name = str(where[-1])
    known = list(_fields(model, where[:-1]))
    # difflib's time grows with the square of the length.
    if len(name) <= 60 and (meant := _meant(model, where, name, known)):
        return f"unknown field, did you mean {meant}?", ""
    return "unknown field", f"one of {', '.join(known)}"


def _meant(model: type[BaseModel], where: Where, name: str, known: list[str]) -> str | None:
    """The field that is probably meant. One of which the name is a beginning, or the other way round, comes before one
    of the same name elsewhere, and that before one that is merely alike.
    """
    plain = _plain(name)
    near = difflib.get_close_matches(plain, known, 1) or difflib.get_close_matches(name.lower(), known, 1)
    places = {place: _plain(place.rpartition(".")[2]) for place in _places(model)}
    section = "" if len(where) == 1 else f"{where[0]}."
    inside = {place: leaf for place, leaf in places.items() if place.startswith(section)}
    alike = _only(inside, difflib.get_close_matches(plain, inside.values(), 1)) if section else None
    candidates = [place for place in (*near, _only(inside, [plain]), alike) if place is not None]
    longer = [place for place in candidates if _begins(_plain(place.rpartition(".")[2]), plain)]
    return next(iter([*longer, *filter(None, [_only(places, [plain])]), *candidates]), None)


def _begins(one: str, other: str) -> bool:
    """Whether one of them begins with the other."""
    return one.startswith(other) or other.startswith(one)


def _only(places: Mapping[str, str], names: list[str]) -> str | None:
    """The place with such a name, if there is exactly one."""
    found = [place for place, leaf in places.items() if leaf in names]
    return found[0] if len(found) == 1 else None


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _fields(model: type[BaseModel], where: Where) -> Mapping[str, FieldInfo]:
    """The fields that a mapping at this place may have."""
    for part in where:
        section = _section(model.model_fields[str(part)])
        assert section is not None
        model = section
    return model.model_fields


def _places(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        yield prefix + name
        if (section := _section(info)) is not None:
            yield from _places(section, f"{prefix}{name}.")


def _section(info: FieldInfo) -> type[BaseModel] | None:
    """The model that a field holds, if it holds one."""
    for kind in (info.annotation, *typing.get_args(info.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None
