"""Every view in a real browser: what it shows, that nobody is left out, and that nothing complains."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import axe_playwright_python
import pytest
from playwright.sync_api import Route, expect

from tests.browser.conftest import Dashboard, Tab, Tabs
from tests.browser.seed import ERROR, HOSTILE, SHOWN, Seeded

AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()


def routes(seeded: Seeded) -> dict[str, tuple[str, str]]:
    """Each view: its route, and a text that it shows."""
    jobs = seeded.jobs
    return {
        "queue": ("queue", "held-back"),
        "filtered": ("queue?state=failed", "inbox-photos"),
        "nothing": ("queue?q=no+such+job", "No job matches."),
        "scored": (f"job/{jobs['succeeded']}", "larger input.batch_size"),
        "trained": (f"job/{jobs['trained']}", "finetune of torchvision:resnet18"),
        "failed": (f"job/{jobs['failed']}", ERROR),
        "store": ("store", "its stored bytes have changed"),
        "schedule": (f"store/{seeded.keys['ready']}", "Critical path"),
        "timers": ("timers", "at the start of every hour, UTC"),
        "timer": ("timers/nightly", "Next ticks"),
        "workers": ("workers", seeded.lease.id),
    }


@pytest.mark.parametrize("width", [1280, 390])
def test_every_view(seeded: Seeded, dashboard: Dashboard, tabs: Tabs, width: int) -> None:
    """It shows what it is about, below one heading, with no sideways scrolling and nothing on the console."""
    tab = tabs.open(dashboard, width=width)
    seeded.alive()
    for view, (route, text) in routes(seeded).items():
        page = tab.go(route)
        page.wait_for_selector(f"#main :text({json.dumps(text)})")
        assert page.locator("#health p").inner_text(), view
        assert page.locator("main h1").first.inner_text(), view
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
        assert "nimble-jobs" in page.title()


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(seeded: Seeded, dashboard: Dashboard, tabs: Tabs, scheme: Any, width: int) -> None:
    """Contrast, names, roles, order of headings: axe's checks of each view."""
    # In the test's own context the page's policy is off, because axe must be brought in.
    tab = tabs.open(dashboard, width=width, bypass_csp=True, color_scheme=scheme, reduced_motion="reduce")
    for view, (route, text) in routes(seeded).items():
        page = tab.go(route)
        page.wait_for_selector(f"#main :text({json.dumps(text)})")
        page.evaluate(f"window.axe === undefined && (0, eval)({json.dumps(AXE)})")
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        problems = [(each["id"], [node["target"] for node in each["nodes"]]) for each in found]
        assert problems == [], (view, problems)


def test_gpus(seeded: Seeded, tab: Tab) -> None:
    """A card for each, also if they are alike, with memory and use; what a driver does not tell is left out."""
    seeded.alive()
    gpu = {"name": "NVIDIA H200", "memory_used_bytes": 45 << 30, "memory_total_bytes": 140 << 30, "utilisation": 0.625}
    gpus = [
        gpu | {"index": 0, "temperature_c": 41, "power_w": 322.4},
        gpu | {"index": 1, "utilisation": None, "temperature_c": None, "power_w": None},
    ]

    def answer(route: Route) -> None:
        response = route.fetch()
        route.fulfill(response=response, json=response.json() | {"gpus": gpus})

    tab.page.route("**/api/workers", answer)
    page = tab.go("workers")
    cards = page.locator('section[aria-label^="GPU"]')
    for used in ("45.0 GiB of 140.0 GiB", "90.0 GiB of 140.0 GiB"):  # when they are drawn first, and again
        expect(cards).to_have_count(2)
        expect(cards.first).to_contain_text(used)
        expect(cards.first).to_contain_text("Busy62%Temperature41 °CPower322 W")
        expect(cards.last).to_contain_text("GPU 1: NVIDIA H200")
        expect(cards.last).not_to_contain_text("Busy")
        gpus[0]["memory_used_bytes"] = 90 << 30
        seeded.store.jobs.event("note", "something has changed", now=time.time())


def test_names_and_logs_are_text(seeded: Seeded, tab: Tab) -> None:
    """Markup is shown, control characters and marks that turn text around are escaped, and no script runs."""
    page = tab.go("queue")
    name = page.locator(f'tr[data-key="{seeded.jobs["hostile"]}"] td.name bdi')
    assert name.inner_text() == SHOWN
    page = tab.go(f"job/{seeded.jobs['hostile']}")
    assert page.locator("h1 bdi").inner_text() == SHOWN
    assert "<script>alert(2)</script>" in page.locator("#log").inner_text()
    assert page.locator("img[src=x], #log script").count() == 0
    assert HOSTILE not in page.content()


def test_a_link_on_another_site(dashboard: Dashboard, tab: Tab) -> None:
    """The cookie does not come along. A page says so, and its button opens the view that the link names."""
    page = tab.page
    page.wait_for_selector("tr[data-key]")
    page.goto(f"data:text/html,<a href='http://127.0.0.1:{dashboard.port}/%23/timers/nightly'>elsewhere</a>")
    page.click("a")
    page.wait_for_selector('h1:text("Not signed in")')
    page.click("button")
    page.wait_for_selector('#main[data-route="#/timers/nightly"]')
    page.wait_for_selector('h1:has-text("nightly")')
    tab.errors.clear()  # the console notes the 401


def test_nothing_of_the_last_view_stays(seeded: Seeded, tab: Tab) -> None:
    """From job to job, and from a search to the whole queue: log, curves and search field are those of the new view."""
    tab.go(f"job/{seeded.jobs['trained']}")
    page = tab.go(f"job/{seeded.jobs['succeeded']}")
    page.wait_for_selector('#log:has-text("digits-score")')
    assert "digits-train" not in page.locator("#main").inner_text()
    page = tab.go("queue?q=no+such+job")
    page.click("text=Show all jobs")
    page.wait_for_selector("tr[data-key]")
    assert page.input_value("#q") == ""


def test_what_is_unknown_is_said(tab: Tab) -> None:
    """An address that leads nowhere gives the words of the command line, and a way back."""
    page = tab.page
    page.goto(page.url.partition("#")[0] + "#/job/2n0000000000")
    page.wait_for_selector('main [role="alert"]:has-text("job")')
    page.click("text=Show the queue")
    page.wait_for_selector("tr[data-key]")
    tab.errors.clear()  # the console notes the 404


def test_read_only_shows_no_buttons(seeded: Seeded, tabs: Tabs, started: list[Dashboard], tmp_path: Path) -> None:
    """A dashboard that may change nothing offers nothing, and says why."""
    started.append(Dashboard(seeded.store.home, tmp_path / "log", "--read-only"))
    tab = tabs.open(started[0])
    for route in ("queue", f"job/{seeded.jobs['failed']}", "timers", "workers"):
        page = tab.go(route)
        assert page.locator("main button").count() == 0, route
    assert "--read-only" in page.locator("#foot").inner_text()
