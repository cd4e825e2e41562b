"""A browser, a dashboard, and the state folder that it shows. Without a browser on this machine the tests skip."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, sync_playwright

from nimble_jobs.store import Store, open_store
from nimble_jobs.store.home import resolve
from tests import prefork
from tests.browser.seed import Seeded, seed

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_COMES = "NIMBLE_JOBS_TESTS_BROWSER"  # a file that is locked while a browser is installed
_ADDRESS = re.compile(r"http://\S+\?token=\w+")
_START_S = 120.0


class Dashboard:
    """A running `nimble-jobs dashboard`, which can be killed and started again."""

    def __init__(self, home: Path, log: Path, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._command = [*("--home", str(home), "dashboard", "--port", str(self.port)), *options]
        self._log = log
        self.start()

    def start(self) -> None:
        with self._log.open("w") as file:
            command = [sys.executable, "-m", "nimble_jobs.cli.main", *self._command]
            self._process = prefork.start(command, stdout=file, stderr=subprocess.STDOUT, text=True)
        deadline = time.monotonic() + _START_S
        while not (found := _ADDRESS.search(self._log.read_text())):
            assert time.monotonic() < deadline, self._log.read_text()
            assert self._process.poll() is None, self._log.read_text()
            time.sleep(0.05)
        self.address = found[0]

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def url(self, route: str) -> str:
        return f"http://127.0.0.1:{self.port}/#/{route}"


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Debian's browser, or another Chromium of this machine.

    Playwright's event loop runs until the last test of this folder. Tests elsewhere could not start one of their own.
    """
    if coming := os.environ.get(_COMES):
        with Path(coming).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)
    path = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if path is None:
        pytest.skip("no browser: install chromium to run these tests")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeded]:
    """A state folder with jobs in every state, schedules, timers, and a worker that holds its lock."""
    home = tmp_path_factory.mktemp("browser") / "home"
    with open_store(resolve(str(home))) as store, seed(store) as found:
        yield found


@pytest.fixture
def store(seeded: Seeded) -> Store:
    return seeded.store


@pytest.fixture(scope="package")
def dashboard(seeded: Seeded, browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    """One dashboard for all tests that do not harm it; after `browser`, which may skip."""
    running = Dashboard(seeded.store.home, tmp_path_factory.mktemp("dashboard") / "log")
    yield running
    running.kill()


class Tab:
    """A page of the browser that is signed in."""

    def __init__(self, page: Page, dashboard: Dashboard, errors: list[str]) -> None:
        self.page, self.errors, self._dashboard = page, errors, dashboard
        page.goto(dashboard.address)

    def freeze(self, pattern: str) -> None:
        """From now on the page gets the next answer again and again."""

        kept: dict[str, Any] = {}

        def answer(route: Route) -> None:
            if not kept:
                response = route.fetch()
                kept.update(body=response.body(), status=response.status, content_type="application/json")
            route.fulfill(**kept)

        self.page.route(pattern, answer)

    def go(self, route: str) -> Page:
        self.page.goto(self._dashboard.url(route))
        self.page.wait_for_selector(f'#main[data-route="#/{route}"]', state="attached")
        self.page.wait_for_selector('#connection[data-state="live"]')
        return self.page


class Tabs:
    """Opens pages, and notes what they complain of."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self.errors: list[str] = []
        self._contexts: list[Any] = []

    def open(self, dashboard: Dashboard, *, width: int = 1280, **options: Any) -> Tab:
        context = self._browser.new_context(viewport={"width": width, "height": 900}, **options)
        context.set_default_timeout(120_000)
        self._contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: message.type in ("error", "warning") and self.errors.append(message.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self._own(request.url))
        return Tab(page, dashboard, self.errors)

    def _own(self, url: str) -> None:
        if not url.startswith(("http://127.0.0.1:", "data:")):
            self.errors.append(f"a request to the outside: {url}")

    def close(self) -> None:
        for context in self._contexts:
            context.close()


@pytest.fixture
def started() -> Iterator[list[Dashboard]]:
    """Dashboards of one test alone; they end after its pages."""
    running: list[Dashboard] = []
    yield running
    for each in running:
        each.kill()


@pytest.fixture
def tabs(browser: Browser, started: list[Dashboard]) -> Iterator[Tabs]:
    """At the end of each test no page may have complained."""
    opened = Tabs(browser)
    yield opened
    opened.close()
    assert opened.errors == []


@pytest.fixture
def tab(tabs: Tabs, dashboard: Dashboard) -> Tab:
    return tabs.open(dashboard)
