"""`python:FILE.py:FACTORY`: a function or class in the user's file, in a folder that the user allowed."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from nimble_jobs.errors import DeviceFault, ModelError, OutOfMemory
from nimble_jobs.models.identity import existing
from nimble_jobs.models.local_import import imported
from nimble_jobs.models.permission import check_python
from nimble_jobs.models.source import similar


def build(file: Path, factory: str, args: dict[str, Any], folders: Sequence[Path]) -> nn.Module:
    """Run the file and return `FACTORY(**args)`, which must be a torch.nn.Module.

    Raises ModelError: the file is not in an allowed folder, its code fails (with its file and line), or the arguments
    do not fit.
    """
    main = existing(file).resolve()
    check_python(main, folders)
    with explained(main), imported(main) as module:
        return _made(_named(module, factory, main, "model.source"), factory, args, main)


def load_function(file: Path, name: str, folders: Sequence[Path], field: str) -> Callable[..., Any]:
    """Run the file and return its function `name`; `field` is the spec's, for messages. Raises ModelError, as above."""
    main = existing(file).resolve()
    check_python(main, folders, field)
    with explained(main), imported(main) as module:
        function: Callable[..., Any] = _named(module, name, main, field)
        return function


@contextmanager
def explained(main: Path, field: str | None = None) -> Iterator[None]:
    """Turn any error of the user's code into one that names the line, and the spec's field if it is given."""
    named = f"{field}: " if field else ""
    try:
        yield
    except ModelError:
        raise
    except torch.OutOfMemoryError as e:
        raise OutOfMemory(f"{named}{_where(e, main)}: {e}") from e
    except torch.AcceleratorError as e:
        raise DeviceFault(f"{named}{_where(e, main)}: {e}") from e
    except (Exception, SystemExit) as e:  # a user's code can raise anything
        raise ModelError(f"{named}{_where(e, main)}: {type(e).__name__}: {_message(e)}") from e


def _named(module: ModuleType, name: str, main: Path, field: str) -> Any:
    found = getattr(module, name, None)
    if callable(found):
        return found
    names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
    raise ModelError(f"{field}: {main} has no function or class {name!r}{similar(name, names)}")


def _made(factory: Any, name: str, args: dict[str, Any], main: Path) -> nn.Module:
    try:
        inspect.signature(factory).bind(**args)
    except TypeError as e:
        raise ModelError(f"model.args: {name} in {main}: {e}") from e
    except ValueError:  # a callable that has no signature to check
        pass
    made = factory(**args)
    if not isinstance(made, nn.Module):
        raise ModelError(f"model.source: {name} in {main} returned a {type(made).__name__}; expected a torch.nn.Module")
    return made


def _where(e: BaseException, main: Path) -> str:
    """FILE:LINE of the innermost frame in the model's own folder."""
    if isinstance(e, SyntaxError) and e.filename:
        return f"{e.filename}:{e.lineno}"
    frames = traceback.extract_tb(e.__traceback__)
    own = [f for f in frames if Path(f.filename).is_relative_to(main.parent)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else str(main)


def _message(e: BaseException) -> str:
    return str(e.msg if isinstance(e, SyntaxError) else e)
