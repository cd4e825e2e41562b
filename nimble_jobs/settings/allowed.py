"""Checks targets of notifications against the hosts and program folders that the configuration lists."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nimble_jobs.errors import Problem, SpecError
from nimble_jobs.spec import code
from nimble_jobs.spec.notify import NotifySpec, hosts_of

if TYPE_CHECKING:
    from nimble_jobs.settings.model import Settings


def check_targets(notify: NotifySpec | None, settings: Settings, file: str) -> None:
    """Raises SpecError if the configuration does not allow a target of a spec's `notify`. `file`: for messages."""
    if notify is None:
        return
    problems: list[Problem] = []
    for name, address in (("webhook", notify.webhook), ("ping", notify.ping)):
        if address is not None and (problem := about_host(address, settings.notify.hosts)) is not None:
            expected = (
                f"a host of notify.hosts in config.yaml: {', '.join(settings.notify.hosts) or 'the list is empty'}"
            )
            problems.append(Problem(file=file, line=0, field=f"notify.{name}", problem=problem, expected=expected))
    if notify.command is not None:
        problem = about_program(notify.command[0], settings.notify.commands)
        if problem is not None:
            problems.append(Problem(file=file, line=0, field="notify.command", problem=problem))
    if notify.webhook is None and notify.command is None and notify.ping is None:
        ours = settings.notify
        if ours.webhook is None and ours.command is None and ours.ping is None:
            problem, expected = "names no target, and neither does config.yaml", "webhook, command or ping"
            problems.append(Problem(file=file, line=0, field="notify", problem=problem, expected=expected))
    if problems:
        raise SpecError(problems)


def about_host(address: str, allowed: Sequence[str]) -> str | None:
    """Why nothing may be sent to an address; None if it is allowed, or a variable hides its host. Raises BadValue."""
    names = hosts_of(address)
    return None if names is None or not set(names).isdisjoint(allowed) else f"the host {names[0]} is not allowed"


def about_program(program: str, folders: Sequence[str]) -> str | None:
    """Why a command may not run; None if it may."""
    real = Path(program).resolve()
    if not code.allowed(real, [Path(folder) for folder in folders]):
        return f"{program} may not be run; allow its folder under notify.commands in config.yaml"
    try:
        for place in (real, real.parent):
            info = place.stat()
            if info.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(info.st_mode) & 0o022 & ~_sticky(info):
                return f"{program} may not be run, because others can write to {place}"
    except OSError as e:
        return f"{program} cannot be run ({e.strerror})"
    return None


def _sticky(info: os.stat_result) -> int:
    """The sticky bit: in a folder such as /tmp users cannot replace each other's files."""
    return 0o022 if stat.S_ISDIR(info.st_mode) and info.st_mode & stat.S_ISVTX else 0
