"""What changes while the page is open, and what the reader changes."""

from __future__ import annotations

import json
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import APIResponse, Error, Page, Route, expect

from nimble_jobs.data.hidden import staging_root
from nimble_jobs.job import BadKind, JobState
from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.workloads.training.gauge.journal import METRICS
from tests.browser.conftest import Dashboard, Tab, Tabs
from tests.browser.seed import Seeded
from tests.browser.tunnel import Tunnel
from tests.store_samples import many_jobs

# Collects the numbers of the events that the page was told.
NOTE_NUMBERS = """() => {
    window.numbers = [];
    document.addEventListener("nimble:change", (event) => window.numbers.push(event.detail.seq));
}"""


def row(page: Page, job: str) -> Any:
    return page.locator(f'tr[data-key="{job}"]')


def test_a_running_job_moves(seeded: Seeded, tab: Tab) -> None:
    """Its bar, rate and log follow what the worker writes, and its end is shown without a reload."""
    store = seeded.store
    page = tab.go("queue")
    job = seeded.submit("runs-now", priority=9)
    row(page, job.id).wait_for()
    job = seeded.take(job)
    row(page, job.id).locator('.badge:text("running")').wait_for()
    progress: Any = {"total": 1000, "bad": 0, "phase": "run", "timings": {"records_per_s": 50.0}}
    for done in (250, 500):
        store.jobs.progress(job.id, job.attempt, done=done, **progress)
        row(page, job.id).locator(f'progress[value="{done}"]').wait_for()
    assert "10s left" in row(page, job.id).inner_text()
    seeded.log(job.id, "INFO the first line\n")
    page = tab.go(f"job/{job.id}")
    page.wait_for_selector('#log:text("the first line")')
    page.click("summary:text('Spec')")
    seeded.log(job.id, "INFO the second line\n")
    store.jobs.progress(job.id, job.attempt, done=750, **progress)
    page.wait_for_selector('#log:text("the second line")')
    page.keyboard.press("p")
    seeded.log(job.id, "INFO the third line\n")
    store.jobs.progress(job.id, job.attempt, done=800, **progress)
    page.wait_for_selector('progress[value="800"]')
    assert "third" not in page.locator("#log").inner_text()
    page.keyboard.press("p")
    store.jobs.finish(job.id, job.attempt, outputs={}, timings={}, schedule={}, now=time.time())
    page.wait_for_selector('.head .badge:text("succeeded")')
    page.wait_for_selector('#log:text("the third line")')
    assert "torchvision:resnet18" in page.locator("details[open] .spec").inner_text()  # what was opened stays open


def test_curves_and_bad_records_of_a_job(seeded: Seeded, tab: Tab) -> None:
    """What a training has written so far is drawn, and the curves go on as it writes more. Its bad records are listed
    by kind, also after it has failed.
    """
    store = seeded.store
    job = seeded.take(seeded.submit("learns-now", kind="finetune", priority=9))
    folder = staging_root(seeded.folder / "out", job.id) / f"attempt-{job.attempt}"
    folder.mkdir(parents=True)
    kinds = [
        BadKind(reason="label 7 is not a class", count=1200, first="x.npz: record 7"),
        BadKind(reason="<b>not a number</b>", count=1, first="x.npz: record 9"),
    ]

    def learned(steps: range) -> None:
        with (folder / METRICS).open("a") as file:
            for step in steps:
                file.write(json.dumps({"kind": "step", "step": step, "loss": 8 / step, "accuracy": 0.5}) + "\n")
        store.jobs.progress(job.id, job.attempt, done=steps.stop, total=100, bad=1201, phase="run", bad_kinds=kinds)

    learned(range(1, 5))
    page = tab.go(f"job/{job.id}")
    page.wait_for_selector('[data-figure="loss"] canvas')
    assert page.locator('[data-figure="loss"]').get_attribute("aria-label") == "Loss: 2, at step 4"
    assert page.locator("[data-figure]").count() == 2  # no learning rate was written, so none is drawn
    cells = page.locator('[data-key="Bad records"] tbody td')
    said = ["1,200", kinds[0].reason, kinds[0].first, "1", kinds[1].reason, kinds[1].first]
    expect(cells).to_have_text(said)
    learned(range(5, 17))
    page.wait_for_selector('[data-figure="loss"][aria-label="Loss: 0.5, at step 16"]')
    store.jobs.fail(job.id, job.attempt, error="1201 of 9000 records are bad", retry=False, now=time.time())
    page.wait_for_selector('.head .badge:text("failed")')
    expect(cells).to_have_text(said)


def test_hold_release_cancel_retry(seeded: Seeded, tab: Tab) -> None:
    """The buttons do what the commands do; cancel asks first."""
    job = seeded.submit("ordered-about", priority=-9)
    page = tab.go("queue")
    mine = row(page, job.id)
    mine.locator('button:text("Hold")').click()
    mine.locator('.badge:text("held")').wait_for()
    assert seeded.store.jobs.get(job.id).held
    mine.locator('button:text("Release")').click()
    mine.locator('.badge:text("queued")').wait_for()
    mine.locator('button:text("Cancel")').click()
    page.click("#confirm-no")
    assert seeded.store.jobs.get(job.id).state is JobState.QUEUED
    mine.locator('button:text("Cancel")').click()
    page.click("#confirm-yes")
    mine.locator('.badge:text("cancelled")').wait_for()
    mine.locator('button:text("Retry")').click()
    mine.locator('.badge:text("queued")').wait_for()
    assert not seeded.store.jobs.get(job.id).held
    seeded.store.jobs.cancel(job.id, time.time())


def test_a_refusal_is_shown_in_the_words_of_the_command_line(seeded: Seeded, tab: Tab) -> None:
    """A button that comes too late: the job has ended meanwhile, though the page does not know yet."""
    job = seeded.submit("too-late", priority=-9)
    tab.freeze("**/api/jobs?*")
    page = tab.go("queue")
    hold = row(page, job.id).locator('button:text("Hold")')
    hold.wait_for()
    seeded.store.jobs.cancel(job.id, time.time())
    hold.click()
    page.wait_for_selector(f'#toast:has-text("{job.id}")')
    tab.errors.clear()  # the console notes the 409


def test_timers_and_workers_obey(seeded: Seeded, tab: Tab) -> None:
    """Pause, resume and run a timer; pause, resume and drain a worker."""
    seeded.alive()
    page = tab.go("timers")
    unused = page.locator('tr[data-key="unused"]')
    unused.locator('button:text("Pause")').click()
    unused.locator('.badge:text("paused")').wait_for()
    unused.locator('button:text("Resume")').click()
    unused.locator('.badge:text("active")').wait_for()
    unused.locator('button:text("Run now")').click()
    unused.locator(".ticks a").wait_for()
    [tick] = seeded.store.timers.ticks("unused")
    assert tick.kind.value == "manual"
    assert tick.job is not None
    seeded.store.jobs.cancel(tick.job, time.time())
    page = tab.go("workers")
    page.click('button:text("Pause")')
    page.wait_for_selector('main .badge:text("paused")')
    page.click('button:text("Resume")')
    page.wait_for_selector('main .badge:text("idle")')
    assert seeded.store.orders.of_each([seeded.lease.id])[seeded.lease.id].wanted == "run"


def test_an_old_answer_does_not_replace_a_newer_one(seeded: Seeded, tab: Tab) -> None:
    """An answer from before an order arrives after it."""
    seeded.alive()
    page = tab.go("workers")
    held: list[tuple[Route, APIResponse]] = []
    page.route("**/api/workers", lambda route: held.append((route, route.fetch())), times=1)
    with page.expect_request("**/api/workers"):
        job = seeded.submit("makes-it-read", priority=-9)
    page.click('button:text("Pause")')
    page.wait_for_selector("#toast:visible")
    page.wait_for_timeout(500)
    [(route, answer)] = held
    route.fulfill(response=answer)
    page.wait_for_selector('main .badge:text("paused")')
    page.wait_for_timeout(500)
    assert page.locator('main .badge:text("paused")').count() == 1
    page.click('button:text("Resume")')
    page.wait_for_selector('main .badge:text("idle")')
    seeded.store.jobs.cancel(job.id, time.time())


def test_a_restart_misses_nothing(seeded: Seeded, tabs: Tabs, started: list[Dashboard], tmp_path: Path) -> None:
    """The server is killed and comes back: the page says so, and then has every event, each once and in order."""
    started.append(server := Dashboard(seeded.store.home, tmp_path / "log"))
    page = tabs.open(server).go("queue")
    page.evaluate(NOTE_NUMBERS)
    first = seeded.submit("before-the-fall", priority=-9)
    row(page, first.id).wait_for()
    server.kill()
    page.wait_for_selector('#connection[data-state="reconnecting"]')
    jobs = [seeded.submit(f"while-away-{n}", priority=-9) for n in range(5)]
    server.start()
    page.wait_for_selector('#connection[data-state="live"]')
    for job in jobs:
        row(page, job.id).wait_for()
    with closing(sqlite3.connect(seeded.store.home / "nimble-jobs.db")) as database:
        after = "SELECT seq FROM events WHERE seq >= (SELECT min(seq) FROM events WHERE job = ?) ORDER BY seq"
        written = [number for (number,) in database.execute(after, [first.id])]
    assert page.evaluate("window.numbers") == written
    for job in [first, *jobs]:
        seeded.store.jobs.cancel(job.id, time.time())
    tabs.errors.clear()  # the console notes that the server was away


def test_what_could_not_be_read_is_read_later(
    seeded: Seeded, tabs: Tabs, started: list[Dashboard], tmp_path: Path
) -> None:
    """An answer that got lost while the page is live, and a view that was opened while the server was away."""
    started.append(server := Dashboard(seeded.store.home, tmp_path / "log"))
    page = tabs.open(server).go("queue")
    page.route("**/api/jobs?*", lambda route: route.abort(), times=1)
    with page.expect_event("requestfailed"):
        job = seeded.submit("answer-lost", priority=-9)
    row(page, job.id).wait_for(timeout=120_000)
    seeded.store.jobs.cancel(job.id, time.time())
    row(page, job.id).locator('.badge:text("cancelled")').wait_for()
    server.kill()
    page.wait_for_selector('#connection[data-state="reconnecting"]')
    page.click("#nav >> text=Timers")
    page.wait_for_selector('main [role="alert"]')
    server.start()
    page.locator('tr[data-key="unused"]').wait_for()
    tabs.errors.clear()  # the console notes what did not arrive


def test_a_tunnel_that_hangs(seeded: Seeded, tabs: Tabs, started: list[Dashboard], tmp_path: Path) -> None:
    """Connections that look alive and bring nothing: the page says so after 40 s, and misses nothing later."""
    with closing(Tunnel()) as tunnel:
        started.append(
            server := Dashboard(seeded.store.home, tmp_path / "log", "--allow-host", f"127.0.0.1:{tunnel.port}")
        )
        server.address = server.address.replace(f":{server.port}/", f":{tunnel.port}/")
        tunnel.target, server.port = server.port, tunnel.port
        tab = tabs.open(server)
        tab.page.clock.install()
        tab.page.clock.pause_at(time.time() + 60)  # so that only this test, and no slow machine, lets time pass
        tab.page.reload()
        page = tab.go("queue")
        tunnel.die()
        job = seeded.submit("while-it-hangs", priority=-9)
        page.clock.fast_forward(35_000)
        page.wait_for_selector('#connection[data-state="live"]')
        page.clock.fast_forward(10_000)
        page.wait_for_selector('#connection[data-state="reconnecting"]')
        page.clock.fast_forward(41_000)
        page.wait_for_selector('#connection[data-state="reconnecting"]')
        tunnel.revive()
        for _ in range(10):  # a browser may try other old connections first
            page.clock.fast_forward(41_000)
            with suppress(Error):
                page.wait_for_selector('#connection[data-state="live"]', timeout=10_000)
                break
        page.clock.resume()
        row(page, job.id).wait_for(timeout=120_000)  # what the page asks for may take old connections too
        seeded.store.jobs.cancel(job.id, time.time())
        row(page, job.id).locator('.badge:text("cancelled")').wait_for()
        page.goto("about:blank")  # before the tunnel closes, of which the console would make a note
    tabs.errors.clear()  # it has noted what did not arrive


def test_a_hundred_thousand_jobs(
    tabs: Tabs, started: list[Dashboard], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The queue shows its first page, filters and turns pages, and its document stays small. A tenth without --all."""
    count = 100_000 if request.config.getoption("--all") else 10_000
    with open_store(resolve(str(tmp_path / "home"))) as store:
        ids = many_jobs(store, count, now=time.time() - 200_000)
        started.append(Dashboard(store.home, tmp_path / "log"))
    page = tabs.open(started[0]).go("queue")
    row(page, ids[-1]).wait_for()
    assert page.locator("tr[data-key]").count() == 50
    page.click('a:text("Next page")')
    row(page, ids[-51]).wait_for()
    page.click(".states a:has-text('failed')")
    expect(page.locator("tr[data-key] .badge[data-tone=bad]")).to_have_count(50)
    assert page.evaluate("document.querySelectorAll('*').length") < 3000
    assert f"{count // 10:,}" in page.locator(".states a[aria-current]").inner_text()
