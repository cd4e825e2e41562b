"""What all tests share."""

from __future__ import annotations

import gc
import os
import random
import secrets
import shlex
import signal
import sys
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import leftovers, postgres, prefork, shared_dialect

# OpenMP's threads spin while they wait. With more busy processes than cores, as in a parallel test run, they keep each
# other from working: a training step then takes twenty times as long. Set before torch loads, and inherited by the
# processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Searches time their candidates for half a second each. No test is about these figures, so one sample of each will do.
os.environ.setdefault("NIMBLE_JOBS_TIMING_BUDGET_S", "0.001")

# On a CPU eager is often the faster one, and schedules are what most tests are about. Those about the choice unset it.
os.environ.setdefault("NIMBLE_JOBS_EAGER", "reference")

# An idle worker builds what its jobs did without. Those that are about it unset it.
os.environ.setdefault("NIMBLE_JOBS_CACHE_BUILD_AFTER", "off")

# Ray writes a token into the home of whoever starts it without one, and asks later clusters for it. With a token of its
# own, a run neither reads nor writes that file.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

# Python would compile torch's source anew in each of the many processes that tests start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

FREEZE_COUNT = gc.get_freeze_count  # Python's own
ROUNDS = "NIMBLE_JOBS_KILL_ROUNDS"
FAULTS = "NIMBLE_JOBS_FAULT_ROUNDS"
TIMERS = "NIMBLE_JOBS_TIMER_ROUNDS"
TROUBLE = "NIMBLE_JOBS_TROUBLE_S"
_LONGEST = {"test_fault_rounds", "test_training_kill_rounds", "test_a_worker_runs_what_the_files_say"}
_WAITING = {"acceptance", "browser"}  # folders of tests that mostly wait for processes
_SERVERS = pytest.StashKey[list[prefork.Server]]()
_RESTING = pytest.StashKey[int]()

# Examples may take their time on busy cores. `--all` looks for new ones; without it, they are the same in each run.
patient = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("quick", max_examples=50, derandomize=True, **patient)
settings.register_profile("all", max_examples=100, **patient)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--all`."""
    text = "what takes long, too: cold starts of all processes, more rounds of kills, more examples"
    parser.addoption("--all", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Before tests are collected, in this process and in each of xdist's, which inherit the environment."""
    complete = config.getoption("--all")
    settings.load_profile("all" if complete else "quick")
    if not complete:
        shared_dialect.install()
        # More threads than cores wait for each other at the end of each operator, which costs a third of all work.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if hasattr(config, "workerinput"):
        return
    postgres.begin(config.option.basetemp)
    leftovers.sweep()
    os.environ.setdefault(ROUNDS, "20" if complete else "3")
    os.environ.setdefault(FAULTS, "200" if complete else "4")
    os.environ.setdefault(TIMERS, "200" if complete else "1")
    os.environ.setdefault(TROUBLE, "125" if complete else "4")
    if complete:
        os.environ[prefork.COLD] = "1"
    elif not os.environ.get(prefork.COLD) and not config.option.collectonly:
        whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
        config.stash[_SERVERS] = [prefork.Server(many=whole), prefork.Server(light=True)]
        for server in config.stash[_SERVERS]:
            server.announce()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Before xdist starts the test processes: have them forked from one that has collected the tests.

    SIGTERM ends the run as Ctrl-C does: test processes end their tests' processes and remove what they made. A shell's
    background jobs, as in scripts/test, begin with SIGINT ignored, and the tests' processes are not to inherit that.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    if _SERVERS in config.stash:
        chosen = [str(config.invocation_params.dir / arg) for arg in config.args]
        server = prefork.Server(*chosen)
        config.stash[_SERVERS].append(server)
        for spec in specs:
            spec.python = shlex.join(prefork.words(server.path))


def _leave_to_rest(config: pytest.Config) -> None:
    """Keep the garbage collector from looking at what was imported so far: that is most of what a test process holds,
    and each look takes half a second.
    """
    gc.collect()
    gc.freeze()
    gc.get_freeze_count = lambda: 1  # to count a million objects takes a tenth of a second, and `run` commands ask
    config.stash[_RESTING] = len(sys.modules)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while test modules are imported: there is hardly any, and it takes a fifth of the time."""
    before = gc.isenabled()
    gc.disable()
    try:
        return (yield)
    finally:
        if before:
            gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let each test process begin with one of the longest, for which the others would wait at the end.

    Give each a share of the files whose tests mostly wait, at another time: side by side they leave the cores idle.
    pytest-xdist gives each process a run of consecutive tests to begin with, all runs of about one length.
    """
    processes = getattr(config, "workerinput", {}).get("workercount", 1)
    if processes == 1:
        return
    longest = [item for item in items if item.name in _LONGEST][:processes]
    waiting: dict[Path, list[pytest.Item]] = {}
    others: list[pytest.Item] = []
    for item in items:
        if item in longest:
            continue
        if item.path.parent.name in _WAITING:
            waiting.setdefault(item.path, []).append(item)
        else:
            others.append(item)
    shares: list[list[pytest.Item]] = [[] for _ in range(processes)]
    for tests in sorted(waiting.values(), key=len, reverse=True):
        min(shares, key=len).extend(tests)
    ordered: list[pytest.Item] = []
    for process, share in enumerate(shares):
        first = longest[process : process + 1]
        length = (len(items) - len(ordered)) // (processes - process)
        own = [others.pop(0) for _ in range(min(len(others), length - len(first) - len(share)))]
        at = len(own) * process // (2 * processes)
        ordered += [*first, *own[:at], *share, *own[at:]]
    items[:] = ordered + others


def pytest_collection_finish(session: pytest.Session) -> None:
    """Before the first test."""
    _leave_to_rest(session.config)
    gc.set_threshold(10_000, 20)  # by default it looks after every 700 new objects, often at what a test still uses


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before each test: it draws the same random numbers in each run. The one before may have imported a compiler."""
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(seed)
    if len(sys.modules) > item.config.stash[_RESTING] + 100:
        _leave_to_rest(item.config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """After each phase of each test."""
    report = yield
    if report.failed:
        prefork.expect_leftovers()
    return report


def pytest_unconfigure(config: pytest.Config) -> None:
    """After the last test."""
    for server in config.stash.get(_SERVERS, []):
        server.close()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread, as processes do that a module's tests kill: sums on more threads have other bits."""
    import torch  # later than the variables above

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
