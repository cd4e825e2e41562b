"""The whole page without a mouse."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.browser.conftest import Tab
from tests.browser.seed import Seeded


def test_by_keyboard_alone(seeded: Seeded, tab: Tab) -> None:
    """Skip link, views, rows, search, theme, help: each is reached by keys, and the focus is visible."""
    page = tab.go("queue")
    keys = page.keyboard
    keys.press("Tab")
    assert page.evaluate("document.activeElement.id") == "skip"
    keys.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    keys.press("j")
    keys.press("j")
    focused = "document.activeElement.closest('tr').rowIndex"
    assert page.evaluate(focused) == 2
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    keys.press("k")
    keys.press("Enter")
    page.wait_for_selector("#main .facts")
    assert page.evaluate("document.activeElement.id") == "main"
    for key, heading in (("2", "Store"), ("3", "Timers"), ("4", "Workers"), ("1", "Queue")):
        keys.press(key)
        page.wait_for_selector(f'#main h1:text("{heading}")', state="attached")
    keys.press("/")
    keys.type("inbox")
    page.wait_for_selector('tr[data-key]:has-text("inbox-photos")')
    expect(page.locator("tr[data-key]")).to_have_count(1)
    assert page.evaluate("document.activeElement.id") == "q"
    keys.press("Escape")
    keys.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    keys.press("?")
    page.wait_for_selector("dialog#help[open]")
    keys.press("Escape")
    page.wait_for_selector("dialog#help[open]", state="detached")


def test_single_keys_can_be_turned_off(tab: Tab) -> None:
    """Speech input types letters: the reader may turn shortcuts off, and the page remembers it."""
    page = tab.go("queue")
    page.keyboard.press("?")
    page.uncheck("#shortcuts")
    page.keyboard.press("Escape")
    page.reload()
    page.wait_for_selector("tr[data-key]")
    page.keyboard.press("2")
    page.keyboard.press("t")
    assert page.url.endswith("#/queue")
    assert page.evaluate("document.documentElement.dataset.theme") == "system"
