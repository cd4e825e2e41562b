"""What contradicts what in a configuration whose fields are each right by themselves."""

from __future__ import annotations

from collections.abc import Iterator

from nimble_jobs.settings.allowed import about_host
from nimble_jobs.settings.model import Settings
from nimble_jobs.spec.findings import Finding, place
from nimble_jobs.spec.tree import Tree


def check(settings: Settings, tree: Tree) -> None:
    """Report every contradiction into the tree."""
    for found in (*_twice(settings), *_hosts(settings)):
        if not any(place(found.field)[: len(bad)] == bad or bad[:2] == place(found.field) for bad in tree.bad):
            tree.report(place(found.field, found.index), found.problem, found.expected)


def _twice(settings: Settings) -> Iterator[Finding]:
    lists = {
        "allow_python": settings.allow_python,
        "notify.on": settings.notify.on,
        "notify.hosts": settings.notify.hosts,
        "notify.commands": settings.notify.commands,
    }
    for field, items in lists.items():
        for index, item in enumerate(items):
            if item in items[:index]:
                yield Finding(field, f"{item} is given twice", "each once", index=index)


def _hosts(settings: Settings) -> Iterator[Finding]:
    for name in ("webhook", "ping"):
        address = getattr(settings.notify, name)
        problem = None if address is None else about_host(address, settings.notify.hosts)
        if problem is not None:
            yield Finding(f"notify.{name}", problem, "a host of notify.hosts")
