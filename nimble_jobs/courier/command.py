"""Runs a command without a shell, in its own process group, with the message on standard input."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from nimble_jobs.courier.refusals import NotTaken
from nimble_jobs.settings.allowed import about_program

_TAIL_BYTES = 2000


async def run(words: Sequence[str], content: bytes, folders: Sequence[str], timeout_s: float) -> None:
    """Raises NotTaken if the command may not run, takes longer than `timeout_s`, or does not exit with 0."""
    program = allowed(words[0], folders)
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as told:
        told.write(content)
        told.seek(0)
        try:
            process = await asyncio.create_subprocess_exec(
                str(program),
                *words[1:],
                stdin=told,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=said,
                start_new_session=True,
                cwd="/",
            )
        except OSError as e:
            raise NotTaken(f"{words[0]} cannot be run ({e.strerror})") from None
        try:
            async with asyncio.timeout(timeout_s):
                code = await process.wait()
        except TimeoutError:
            raise NotTaken(f"{words[0]} took longer than {timeout_s:g} s and was killed") from None
        finally:
            if process.returncode is None:  # its children in the group are killed too
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if code != 0:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise NotTaken(": ".join(filter(None, (words[0], how, _last_line(said)))))


def allowed(program: str, folders: Sequence[str]) -> Path:
    """The resolved program. Raises NotTaken unless it is in one of the folders and only this user can change it."""
    if (problem := about_program(program, folders)) is not None:
        raise NotTaken(problem)
    return Path(program).resolve()


def _last_line(said: IO[bytes]) -> str:
    size = said.seek(0, os.SEEK_END)
    said.seek(max(0, size - _TAIL_BYTES))
    lines = [line.strip() for line in said.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""
