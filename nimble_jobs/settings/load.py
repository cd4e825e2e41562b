"""Reads config.yaml, environment and command line into `Settings`, or reports all problems with their lines."""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from nimble_jobs.errors import Problem, SettingsError
from nimble_jobs.regular import NotRegular, open_regular
from nimble_jobs.settings import rules
from nimble_jobs.settings.fields import without_password
from nimble_jobs.settings.model import DEFAULT, Settings
from nimble_jobs.spec.overrides import put
from nimble_jobs.spec.tree import MAX_BYTES, Origin, Tree, parse
from nimble_jobs.spec.units import show
from nimble_jobs.spec.validate import validate

FILE = "config.yaml"
PREFIX = "NIMBLE_JOBS_"
COMMAND_LINE = "command line"
_OTHER_NAMES = {"limits.patience": f"{PREFIX}PATIENCE", "database": f"{PREFIX}DB"}  # older than the file
_FOLDERS = ("allow_python", "notify.commands")  # lists that the environment separates as in PATH
_LISTS = ("notify.on", "notify.hosts", "notify.command")


def variable(field: str) -> str:
    """The environment variable that overrides a dotted field."""
    return _OTHER_NAMES.get(field, PREFIX + field.replace(".", "_").upper())


def read_settings(
    home: Path,
    *,
    environ: Mapping[str, str] | None = None,
    given: Mapping[str, str | None] | None = None,
    file: bool = True,
) -> Settings:
    """The configuration of the state folder `home`: its config.yaml, overridden by the environment (by default this
    process's), overridden by `given`.

    `given` holds command-line options, as texts by dotted field, None if not given: `{"device": "cuda"}`. Without a
    file, or with `file` false, the defaults hold. Raises SettingsError with all problems.
    """
    path = home / FILE
    return _settings(_read(path) if file else None, path, os.environ if environ is None else environ, given or {})


def database_of(home: Path) -> str | None:
    """The address in `database` of config.yaml, if there is one. Raises SettingsError for a file that has one and is
    not valid.
    """
    source = _read(home / FILE)
    if source is None or b"database" not in source:
        return None
    return _settings(source, home / FILE, {}, {}).database


def check_file(path: Path) -> Settings:
    """The settings of a file alone, which must exist. Raises SettingsError with all problems."""
    source = _read(path)
    if source is None:
        raise _unreadable(path, "no such file")
    return _settings(source, path, {}, {})


def _settings(
    source: bytes | None, path: Path, environ: Mapping[str, str], given: Mapping[str, str | None]
) -> Settings:
    file = str(path)
    tree = parse(source or b"", file)
    if () not in tree.bad and tree.value is None:
        tree.value = {}  # no file, or nothing but comments
    if () not in tree.bad and not isinstance(tree.value, dict):
        tree.report((), f"found {show(tree.value)}", "a mapping of fields")
        tree.bad.add(())
    if () not in tree.bad:
        _override(tree, environ, given)
        _unknown(tree, environ)
        base = Path(os.path.abspath(path)).parent  # noqa: PTH100 - resolve() would follow symlinks
        settings = validate(tree, Settings, base)
        if settings is not None:
            rules.check(settings, tree)
            if not tree.problems:
                return settings.with_origins(_origins(settings, tree, file))
    raise SettingsError(sorted(tree.problems, key=lambda p: (p.file != file, p.line)))


def _override(tree: Tree, environ: Mapping[str, str], given: Mapping[str, str | None]) -> None:
    for field in Settings().flat():
        name = variable(field)
        where = tuple(field.split("."))
        if text := environ.get(name):
            put(tree, where, _as_yaml(field, text), Origin(f"environment {name}", 0))
        option = given.get(field)
        if option is not None:
            put(tree, where, _as_yaml(field, option), Origin(f"{COMMAND_LINE} --{field.replace('_', '-')}", 0))


def _unknown(tree: Tree, environ: Mapping[str, str]) -> None:
    """Report variables with a section's prefix that name none of its fields."""
    known = {variable(field) for field in Settings().flat()}
    sections = tuple({f"{PREFIX}{field.partition('.')[0].upper()}_" for field in Settings().flat() if "." in field})
    for name in sorted(environ):
        if name.startswith(sections) and name not in known and environ[name]:
            near = difflib.get_close_matches(name[:60], sorted(known), 1)
            problem = f"names no field, did you mean {near[0]}?" if near else "names no field"
            tree.report_at(Origin(f"environment {name[:100]}", 0), (), problem)


def _as_yaml(field: str, text: str) -> str:
    """The YAML of a variable. Lists are plain text there: folders as in PATH, others with commas."""
    if field == "database":  # only the environment may hold a password, and no value shows it
        return "'" + without_password(text).replace("'", "''") + "'"
    if (field not in _FOLDERS and field not in _LISTS) or text.lstrip().startswith("["):
        return text
    words: Iterable[str]
    if field in _FOLDERS:
        words = (str(Path(word).expanduser().absolute()) for word in text.split(os.pathsep) if word)
    else:
        words = (word.strip() for word in text.split(",") if word.strip())
    return "[" + ", ".join("'" + word.replace("'", "''") + "'" for word in words) + "]"


def _origins(settings: Settings, tree: Tree, file: str) -> dict[str, str]:
    origins = {}
    for field in settings.flat():
        origin = tree.origins.get(tuple(field.split(".")))
        if origin is None:
            origins[field] = DEFAULT
        else:
            origins[field] = f"{file}:{origin.line}" if origin.line else origin.file
    return origins


def _read(path: Path) -> bytes | None:
    """The file's bytes; None if it is missing. Only this user may write it, because it decides which code runs."""
    try:
        with open_regular(path) as stream:
            info = os.fstat(stream.fileno())
            source = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except NotRegular as e:
        raise _unreadable(path, e.kind) from None
    except OSError as e:
        raise _unreadable(path, f"cannot be read ({e.strerror})") from e
    if len(source) > MAX_BYTES:
        raise _unreadable(path, "larger than 1 MiB")
    if info.st_uid not in (os.geteuid(), 0):
        raise _refused(path, f"belongs to user {info.st_uid}", f"a file of user {os.geteuid()}")
    if stat.S_IMODE(info.st_mode) & 0o022:
        raise _refused(path, f"others can write to it (mode {stat.S_IMODE(info.st_mode):04o})", "mode 0600")
    return source


def _unreadable(path: Path, problem: str) -> SettingsError:
    return _refused(path, problem, "a configuration in YAML")


def _refused(path: Path, problem: str, expected: str) -> SettingsError:
    return SettingsError([Problem(file=str(path), line=0, field="", problem=problem, expected=expected)])
