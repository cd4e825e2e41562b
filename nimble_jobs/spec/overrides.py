"""`KEY=VALUE` on the command line: a dotted path and a YAML value, read by the same rules as the file."""

from __future__ import annotations

from typing import Any

from nimble_jobs.spec.tree import MAX_DEPTH, Origin, Tree, Where, parse
from nimble_jobs.spec.units import show


def apply(tree: Tree, assignment: str) -> None:
    """Set one place of the tree, and make the mappings on the way. Problems name the override's text as their place."""
    key, equals, text = assignment.partition("=")
    label = _label(assignment)
    where: Where = tuple(part.strip() for part in key.split("."))
    if not equals or not all(where) or len(where) > MAX_DEPTH:
        tree.report_at(
            Origin(label, 0), (), "not an assignment", "KEY=VALUE with a dotted key such as input.batch_size=8"
        )
        return
    put(tree, where, text, Origin(label, 0))


def put(tree: Tree, where: Where, text: str, origin: Origin) -> None:
    """Set the place `where` to the YAML value of `text`. Problems name the file of `origin`."""
    *parents, last = (str(part) for part in where)
    target: dict[str, Any] = tree.value
    for depth, part in enumerate(parents, start=1):
        if target.get(part) is None:
            target[part] = {}
            tree.origins[where[:depth]] = origin
        if not isinstance(target[part], dict):
            tree.report_at(origin, where[:depth], f"found {show(target[part])}", "a mapping")
            return
        target = target[part]
    value = parse(text, origin.file, line=origin.line, root=where)
    for old in [place for place in tree.origins if place[: len(where)] == where]:
        del tree.origins[old]
    tree.graft(value)
    target[last] = value.value


def _label(assignment: str) -> str:
    text = assignment if assignment.isprintable() else ascii(assignment)[1:-1]
    return "override " + (text if len(text) <= 100 else f"{text[:97]}...")
