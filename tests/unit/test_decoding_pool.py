"""Processes that decode: the same pixels as threads, no end of the job when one dies, nothing left when they end."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from nimble_jobs.data import crew, open_reader, reader
from nimble_jobs.data.buffers import Buffers
from nimble_jobs.data.source import Wanted
from nimble_jobs.decoding.pool import Decoders
from nimble_jobs.decoding.processes import command
from nimble_jobs.decoding.recipe import Recipe
from nimble_jobs.decoding.task import DIED, Shared
from nimble_jobs.decoding.work import BAD, GOOD, STATUS, Files, Work
from nimble_jobs.spec.model import InputSpec
from nimble_jobs.spec.transform import TransformSpec
from tests.waiting import PATIENCE_S, until

RECIPE = Recipe(channels=3, resize=(8, 8), center_crop=None, size=(8, 8))
# As the real program, but a picture whose first byte is K kills the process that decodes it.
DEADLY = """
import os, signal, sys
sys.path.append({root!r})
from nimble_jobs.decoding import do, server
real = do.pixels
def pixels(file, recipe):
    if file.read(1) == b"K":
        os.kill(os.getpid(), signal.SIGKILL)
    file.seek(0)
    return real(file, recipe)
do.pixels = pixels
server.main(int(sys.argv[1]))
"""


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for i in range(24):
        size = (int(rng.integers(9, 90)), int(rng.integers(9, 90)), 3)
        image = Image.fromarray(rng.integers(0, 256, size=size, dtype=np.uint8))
        image.save(tmp_path / f"{i:02}.{'png' if i % 5 == 0 else 'jpg'}")
    (tmp_path / "03.jpg").write_bytes(b"no picture")
    return tmp_path


@pytest.fixture
def memory() -> Iterator[Buffers]:
    with Buffers(1, 64 * RECIPE.nbytes) as buffers:
        yield buffers


def spec_of(folder: Path) -> InputSpec:
    return InputSpec(source=str(folder), format="images", transform=TransformSpec(resize=(16, 12)))  # type: ignore[arg-type]


def work_of(paths: list[Path], first: int = 0) -> Work:
    found = [path.stat() for path in paths]
    offsets = (first + np.arange(len(paths))) * RECIPE.nbytes
    return Work(
        recipe=RECIPE,
        places=np.stack([offsets, np.full(len(paths), RECIPE.nbytes)], axis=1),
        files=Files(
            before="",
            names=b"\0".join(os.fsencode(path) for path in paths),
            facts=np.array([(f.st_size, f.st_mtime_ns, f.st_ino) for f in found], dtype=np.int64),
        ),
    )


def shared(decoders: Decoders, memory: Buffers) -> Shared:
    return decoders.share(memory.memory, memory.fd)


def gone(pids: list[int]) -> bool:
    """Whether none of these processes runs; waits for them."""
    return bool(until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids)))


@pytest.mark.parametrize("form", ["float", "stored"])
def test_processes_and_threads_give_the_same_records(
    pictures: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, ids and bad records are equal to the last bit, in memory of their own and in buffers."""
    monkeypatch.setattr(reader, "FEW", 1)
    wanted = Wanted(stored=form == "stored")
    decoders = Decoders(2)
    try:
        with open_reader(spec_of(pictures)) as here, open_reader(spec_of(pictures)) as away:
            away.hire(decoders)
            shape = here.preprocess.shape if here.preprocess is not None and form == "stored" else here.signature.shape
            nbytes = 5 * int(np.prod(shape)) * (4 if form == "float" else 1)
            with Buffers(2, nbytes) as buffers:
                for given in (None, buffers):
                    expected = here.batches(batch_size=5, wanted=wanted)
                    for mine, theirs in zip(
                        expected, away.batches(batch_size=5, buffers=given, wanted=wanted), strict=True
                    ):
                        np.testing.assert_array_equal(mine.x, theirs.x)
                        assert (mine.ids, mine.bad) == (theirs.ids, theirs.bad)
                        if theirs.buffer is not None:
                            theirs.buffer.release()
        pids = decoders.pids
        assert len(pids) == 2
    finally:
        decoders.close()
    assert gone(pids)


def test_few_pictures_start_no_process(pictures: Path) -> None:
    """They are decoded before a process would have started."""
    decoders = Decoders(2)
    with open_reader(spec_of(pictures)) as few:
        assert few.total < crew.FEW
        few.hire(decoders)
        assert len(few.take(np.arange(24)).ids) == 23
    assert not decoders.running
    decoders.close()


def test_a_process_that_is_killed_is_replaced(pictures: Path, memory: Buffers) -> None:
    """Works that it held are done by others."""
    paths = [p for p in sorted(pictures.iterdir()) if p.name != "03.jpg"]
    decoders = Decoders(2)
    try:
        place = shared(decoders, memory)
        assert decoders.submit(work_of(paths[:1]), place).result().rows[0, STATUS] == GOOD
        first = decoders.pids
        answers = [decoders.submit(work_of([path], i), place) for i, path in enumerate(paths)]
        for pid in first:
            os.kill(pid, signal.SIGKILL)
        assert {int(answer.result().rows[0, STATUS]) for answer in answers} == {GOOD}
        again = decoders.submit(work_of(paths[:1]), place)
        assert again.result().rows[0, STATUS] == GOOD
        assert not set(first) & set(decoders.pids)
    finally:
        decoders.close()


def test_only_the_picture_that_kills_is_bad(pictures: Path, memory: Buffers) -> None:
    """The pictures that it was sent with are decoded; a work of its own is bad, too."""
    (pictures / "99.jpg").write_bytes(b"K")
    paths = [pictures / name for name in ("01.jpg", "99.jpg", "02.jpg", "04.jpg")]
    root = str(Path(__file__).parents[2])
    decoders = Decoders(1, program=[sys.executable, "-c", DEADLY.format(root=root)])
    try:
        place = shared(decoders, memory)
        both = decoders.submit(work_of(paths), place), decoders.submit(work_of(paths[1:2], 10), place)
        after = decoders.submit(work_of(paths[2:], 20), place)
        assert both[0].result().rows[:, STATUS].tolist() == [GOOD, BAD, GOOD, GOOD]
        assert both[0].result().reasons[1] == both[1].result().reasons[0] == DIED
        assert after.result().rows[:, STATUS].tolist() == [GOOD, GOOD]
    finally:
        decoders.close()


def test_threads_do_the_work_where_no_process_starts(pictures: Path, memory: Buffers) -> None:
    """They say why."""
    for program in ([sys.executable, "-c", "pass"], ["/nowhere/python"]):
        decoders = Decoders(2, program=program)
        try:
            place = shared(decoders, memory)
            found = decoders.submit(work_of([pictures / "01.jpg", pictures / "03.jpg"]), place).result()
            assert found.rows[:, STATUS].tolist() == [GOOD, BAD]
            assert decoders.trouble is not None
            assert "no process can be started" in decoders.trouble
        finally:
            decoders.close()


def test_processes_end_when_idle_and_come_again(pictures: Path, memory: Buffers) -> None:
    """Nobody has to say so."""
    decoders = Decoders(1, idle_s=0.05)
    try:
        place = shared(decoders, memory)
        assert decoders.submit(work_of([pictures / "01.jpg"]), place).result().rows[0, STATUS] == GOOD
        assert gone(decoders.pids)
        assert decoders.submit(work_of([pictures / "01.jpg"]), place).result().rows[0, STATUS] == GOOD
    finally:
        decoders.close()


def test_who_waits_hears_of_the_end(pictures: Path, memory: Buffers) -> None:
    """Both of a work that a process holds and of those that no process has room for."""
    decoders = Decoders(1)
    try:
        place = shared(decoders, memory)
        decoders.submit(work_of([pictures / "01.jpg"]), place).result()
        (pid,) = decoders.pids
        os.kill(pid, signal.SIGSTOP)
        waiting = [decoders.submit(work_of([pictures / "01.jpg"]), place) for _ in range(4)]
        while not waiting[1].running():
            time.sleep(0.01)
    finally:
        decoders.close()
    for future in waiting:
        with pytest.raises((CancelledError, RuntimeError)):
            future.result(timeout=PATIENCE_S)


OWNER = """
import os, sys
sys.path.append({root!r})
from nimble_jobs.data.buffers import Buffers
from nimble_jobs.decoding.pool import Decoders
from nimble_jobs.decoding.work import Files, Work
import numpy as np
from nimble_jobs.decoding.recipe import Recipe
recipe = Recipe(channels=3, resize=(8, 8), center_crop=None, size=(8, 8))
memory = Buffers(1, recipe.nbytes)
decoders = Decoders(2)
shared = decoders.share(memory.memory, memory.fd)
facts = np.array([(-1, 0, 0)])
files = Files(before="", names=os.fsencode(sys.argv[1]), facts=facts)
work = Work(recipe=recipe, places=np.array([(0, recipe.nbytes)]), files=files)
for future in [decoders.submit(work, shared) for _ in range(8)]:
    future.result()
if os.fork() == 0:  # a process that holds all that is open, too
    os.close(1)
    import time; time.sleep(600)
print(*decoders.pids, flush=True)
import signal; signal.pause()
"""


@pytest.mark.parametrize("where", ["socketpair", "dup"])
def test_who_waits_hears_of_trouble(
    pictures: Path, memory: Buffers, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Without a free file descriptor no process can be asked. The error is raised, and the next work is done."""
    decoders = Decoders(1)
    where_shared = shared(decoders, memory)
    work = work_of(sorted(pictures.iterdir())[:2])
    real, failed = {"socketpair": socket.socketpair, "dup": os.dup}[where], list[int]()

    def full(*args: Any, **named: Any) -> Any:
        if not failed:
            failed.append(1)
            raise OSError(errno.EMFILE, "Too many open files")
        return real(*args, **named)

    monkeypatch.setattr(socket if where == "socketpair" else os, where, full)
    with pytest.raises(OSError, match="Too many open files"):
        decoders.submit(work, where_shared).result(PATIENCE_S)
    answer = decoders.submit(work, where_shared).result(PATIENCE_S)
    assert answer.rows[:, STATUS].tolist() == [GOOD, GOOD]
    decoders.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_a_process_that_is_killed(pictures: Path, number: int) -> None:
    """Its decoders end with it, although a process that it forked has their sockets open."""
    code = OWNER.format(root=str(Path(__file__).parents[2]))
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, str(pictures / "01.jpg")], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        children = Path(f"/proc/{owner.pid}/task/{owner.pid}/children").read_text().split()
        parents = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in pids}
        owner.send_signal(number)
        owner.wait()
    assert len(pids) == 2
    assert gone([*pids, *parents])
    for child in set(map(int, children)) - parents:
        os.kill(child, signal.SIGKILL)


def test_the_program_loads_neither_torch_nor_specs() -> None:
    """So it starts quickly."""
    code = (
        command()[-1].partition("s.main")[0]
        + "print([n for n in ('torch', 'pydantic', 'pyarrow') if n in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
