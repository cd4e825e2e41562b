"""Contradictions in a configuration whose fields are valid by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nimble_jobs.settings.allowed import about_host
from nimble_jobs.settings.model import Settings
from nimble_jobs.spec import code
from nimble_jobs.spec.findings import Finding, place
from nimble_jobs.spec.tree import Tree


def check(settings: Settings, tree: Tree) -> None:
    """Report every contradiction into the tree, except about fields that are invalid by themselves."""
    for field, items in _lists(settings).items():
        if _known(tree, field):
            for index, item in enumerate(items):
                if item in items[:index]:
                    tree.report(place(field, index), f"{item} is given twice", "each once")
    for found, needs in ((_hosts, "notify.hosts"), (_command, "notify.commands")):
        for finding in found(settings):
            if _known(tree, needs) and _known(tree, finding.field):
                tree.report(place(finding.field), finding.problem, finding.expected)


def _known(tree: Tree, field: str) -> bool:
    """Whether the field, its parents and its items are valid."""
    where = place(field)
    return not any(where[: len(bad)] == bad or bad[: len(where)] == where for bad in tree.bad)


def _lists(settings: Settings) -> dict[str, tuple[str, ...]]:
    return {
        "allow_python": settings.allow_python,
        "notify.on": settings.notify.on,
        "notify.hosts": settings.notify.hosts,
        "notify.commands": settings.notify.commands,
    }


def _hosts(settings: Settings) -> Iterator[Finding]:
    for name in ("webhook", "ping"):
        address = getattr(settings.notify, name)
        problem = None if address is None else about_host(address, settings.notify.hosts)
        if problem is not None:
            yield Finding(f"notify.{name}", problem, "a host of notify.hosts")


def _command(settings: Settings) -> Iterator[Finding]:
    command = settings.notify.command
    folders = [Path(folder) for folder in settings.notify.commands]
    if command is not None and not code.allowed(Path(command[0]), folders):
        yield Finding("notify.command", f"{command[0]} may not be run", "a program in a folder of notify.commands")
