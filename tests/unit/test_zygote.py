"""Children that a forked worker of the tests spawns are as those that multiprocessing starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import prefork, zygote
from tests.waiting import until

WORKER = """
import json, multiprocessing, os, resource, signal, sys
from pathlib import Path

def child(link, parent):
    import ctypes
    name = ctypes.create_string_buffer(16)
    ctypes.CDLL(None).prctl(16, name, 0, 0, 0)
    forked = name.value == b"spawn_main"
    status = dict(line.split(":\\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    link.send({
        "parent": os.getppid() == parent, "group": os.getpgid(0) == os.getpgid(parent),
        "session": os.getsid(0) == os.getsid(parent), "folder": os.getcwd(), "word": os.environ["WORD"],
        "signals": [status[key] for key in ("SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd")],
        "limits": [resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_CORE)],
        "files": sorted(os.readlink(f"/proc/self/fd/{n}").split(":")[0] for n in os.listdir("/proc/self/fd")
                        if os.path.exists(f"/proc/self/fd/{n}")),
        "argv": sys.argv, "path": sys.path, "method": multiprocessing.get_start_method(), "name": __name__,
        "main": sys.modules["__mp_main__"].__file__, "child": multiprocessing.parent_process().pid == parent,
    })
    link.send(forked)
    link.recv()
    sys.exit(7)

if __name__ == "__main__":
    os.environ["WORD"] = "set later"
    os.chdir("/")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    resource.setrlimit(resource.RLIMIT_NOFILE, (900, 1000))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR2])
    context, told = multiprocessing.get_context("spawn"), []
    for end in ("exit", "kill"):
        mine, theirs = context.Pipe()
        process = context.Process(target=child, args=(theirs, os.getpid()))
        process.start()
        theirs.close()
        told.append([mine.recv(), mine.recv()])
        if end == "exit":
            mine.send("go")
        else:
            process.kill()
        process.join()
        told[-1].append(process.exitcode)
        if end == "exit":
            mine.close()
    print(json.dumps(told))
"""
COMMAND = """
import os, sys
from pathlib import Path

worker = [sys.executable, "-P", "-m", "nimble_jobs.worker", "--help"]
read, write = os.pipe()
files = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)] + [(os.POSIX_SPAWN_DUP2, write, n) for n in (1, 2)]
pid = os.posix_spawn(worker[0], worker, os.environ, file_actions=files, setsid=True)
print("prefork_server" in Path(f"/proc/{pid}/cmdline").read_text())
os.close(write)
with open(read) as said:
    print(said.read(), os.getsid(pid) == pid, os.waitpid(pid, 0)[1])
"""
RANK = """
import os, subprocess, sys
from pathlib import Path

ear, mouth = os.pipe()
command = [sys.executable, "-m", "nimble_jobs.workloads.training.follower", str(mouth), str(os.getpid())]
process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(mouth,))
os.close(mouth)
process.stdin.write(b"no JSON\\n")
process.stdin.close()
with open(ear) as said:
    told = said.read()  # it has its name by then, and is still known
status = dict(line.split(":\\t", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
print(status["Name"] == "follower", int(status["PPid"]) == os.getpid(), os.getpgid(process.pid) == os.getpgid(0))
print(told, process.wait())
"""
FORKED = pytest.mark.skipif(bool(os.environ.get(prefork.COLD)), reason="every process is started cold")


@FORKED
def test_a_spawned_child_finds_what_it_would_find(tmp_path: Path) -> None:
    """Parent, group, session, folder, environment, signals, limits, open files and exit code; also of a second one."""
    (tmp_path / "worker.py").write_text(WORKER)
    answers = []
    for run in (subprocess.run, prefork.run):
        command = [sys.executable, str(tmp_path / "worker.py")]
        done = run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        answers.append(json.loads(done.stdout))
    cold, forked = answers
    assert [(was_forked, code) for _, was_forked, code in cold] == [(False, 7), (False, -signal.SIGKILL)]
    assert [(was_forked, code) for _, was_forked, code in forked] == [(True, 7), (True, -signal.SIGKILL)]
    for found, *_ in cold:
        found["files"] = sorted([*found["files"], "socket"])  # a forked child has a zygote of its own
    assert [found for found, *_ in forked] == [found for found, *_ in cold]
    assert cold[0][0]["parent"] is True


@FORKED
def test_a_command_starts_a_worker_as_it_would(tmp_path: Path) -> None:
    """A child in a session of its own, with the files that it was given."""
    (tmp_path / "command.py").write_text(COMMAND)
    answers = []
    for run in (subprocess.run, prefork.run):
        done = run([sys.executable, str(tmp_path / "command.py"), "--wait"], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        answers.append(done.stdout.split("\n", 1))
    (was_forked, cold), (is_forked, forked) = answers
    assert (was_forked, is_forked) == ("False", "True")
    assert forked == cold
    assert cold.startswith("usage: python -m nimble_jobs.worker")
    assert cold.endswith(" True 0\n")


@FORKED
def test_another_rank_is_started_as_it_would(tmp_path: Path) -> None:
    """A child in the same group, which reads its pipe, and whose words and exit code arrive."""
    (tmp_path / "worker.py").write_text(RANK)
    answers = []
    for run in (subprocess.run, prefork.run):
        done = run([sys.executable, str(tmp_path / "worker.py")], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "JSONDecodeError" in done.stderr
        answers.append(done.stdout)
    cold, forked = answers
    assert cold.startswith("False True True\n")
    assert forked == cold.replace("False", "True", 1)


@FORKED
def test_a_zygote_ends_with_its_worker(tmp_path: Path) -> None:
    """Also if that is killed; and a reader of what the worker writes does not wait for it."""
    (tmp_path / "worker.py").write_text("import time; print('up', flush=True); time.sleep(600)")
    process = prefork.start([sys.executable, str(tmp_path / "worker.py")], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout.readline() == "up\n"
        (kept,) = psutil.Process(process.pid).children()
        assert zygote.spawned(process.pid) == []
        process.kill()
        assert process.stdout.read() == ""
        until(lambda: not kept.is_running() or kept.status() == psutil.STATUS_ZOMBIE)
