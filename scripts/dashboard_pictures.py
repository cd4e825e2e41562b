"""Takes the pictures of docs/images/dashboard-*.png: every view of the dashboard, wide and narrow, light and dark.

    scripts/dashboard_pictures.py [--folder /srv/nimble] [--to DIR] [--only VIEW] [--width 390] [--theme dark]

The folder gets a real history first (dashboard_history.py); if it has one, that is shown. The pictures show its
path, so it should not be one of somebody's home. Needs chromium.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import cast

import dashboard_history
import numpy as np
from PIL import Image
from playwright.sync_api import Page, ViewportSize, sync_playwright

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
WIDTHS = {1280: 800, 390: 844}  # and the heights of the screens
TALLEST = 1700
PARTS = {"timeline": "Timeline of a replay"}  # pictures of one part of a view
THEMES = ("light", "dark")
COLOURS = (128, 96, 64, 48, 32)  # fewer if the file would be larger than that
LARGEST = 78 * 1024
HEIGHT = """(tallest) => {  // the page's own, or where the last of its parts ends that is not below `tallest`
    const whole = document.documentElement.scrollHeight;
    const sheets = [...document.querySelectorAll("main .sheet")];
    const parts = sheets.flatMap((sheet) =>
        sheet.clientHeight < tallest / 2 ? sheet : [...sheet.querySelectorAll("tbody tr")]);
    const ends = parts.map((part) => part.getBoundingClientRect().bottom + scrollY);
    return whole <= tallest ? whole : Math.max(...ends.filter((end) => end + 12 <= tallest)) + 12;
}"""
STYLE_COLOURS = """() => {  // what the custom properties of style.css are now, as [red, green, blue]
    const names = [...document.styleSheets].flatMap((sheet) => [...sheet.cssRules])
        .flatMap((rule) => [...(rule.style ?? [])]).filter((name) => name.startsWith("--"));
    const probe = document.body.appendChild(document.createElement("i"));
    return [...new Set(names)].map((name) => {
        probe.style.color = `var(${name})`;
        return getComputedStyle(probe).color.match(/\\d+/g).slice(0, 3).map(Number);
    });
}"""


def views(folder: dashboard_history.Folder) -> dict[str, str]:
    """Route of each view."""

    def newest(*filters: str) -> str:
        given = [word for each in filters for word in ("--filter", each)]
        return folder.nimble("ls", "-q", *given, "--limit", "1")

    schedules = json.loads(folder.nimble("cache", "ls", "--json"))
    sound = next(row["key"] for row in schedules if row["state"] == "ready" and row["mode"] == "inference")
    return {
        "queue": "queue",
        "job": f"job/{newest('name=digits-long')}",
        "scored": f"job/{newest('name=photos', 'state=succeeded')}",
        "timeline": f"job/{newest('name=photos', 'state=succeeded')}",
        "resumed": f"job/{newest('name=digits-train')}",
        "failed": f"job/{newest('state=failed')}",
        "store": "store",
        "schedule": f"store/{sound}",
        "timers": "timers",
        "timer": "timers/inbox-watch",
        "workers": "workers",
    }


def take(page: Page, path: Path, part: str | None) -> None:
    """One part of the page, else the whole page, or as many of its parts as are not too tall; with few colours."""
    if part is not None:
        section = page.locator(f'section[data-key="{part}"]')
        section.scroll_into_view_if_needed()
        page.evaluate("Promise.all([...document.images].map((image) => image.decode()))")
        data = section.screenshot()
    else:
        height = page.evaluate(HEIGHT, TALLEST)
        width = page.viewport_size["width"] if page.viewport_size else 0
        data = page.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": width, "height": height})
    save(Image.open(io.BytesIO(data)).convert("RGB"), path, page.evaluate(STYLE_COLOURS))
    print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")


def save(picture: Image.Image, path: Path, kept: list[list[int]]) -> None:
    """Write it with as many colours as a small file allows, and these as they are."""
    for colours in COLOURS:
        _mapped(picture, _palette(picture, colours, kept)).save(path, optimize=True)
        if path.stat().st_size <= LARGEST:
            break


def _mapped(picture: Image.Image, palette: np.ndarray) -> Image.Image:
    """Each pixel in the nearest colour of the palette, uint8 [n, 3]. Pillow changes even colours that are in it."""
    bands = (np.asarray(picture).astype(np.int32) << (16, 8, 0)).sum(axis=2)
    colours, places = np.unique(bands, return_inverse=True)  # of one number a pixel, as that is quick
    pixels = np.stack([colours >> 16, colours >> 8 & 255, colours & 255], axis=1)
    nearest = ((pixels[:, None] - palette[None].astype(np.int32)) ** 2).sum(axis=2).argmin(axis=1)
    found = Image.fromarray(nearest.astype(np.uint8)[places].reshape(bands.shape))
    found.putpalette(palette.tobytes())
    return found


def _palette(picture: Image.Image, count: int, kept: list[list[int]]) -> np.ndarray:
    """The kept colours and the most frequent ones as they are, and some that are near to the rest: uint8 [count, 3]."""
    counted = sorted(picture.getcolors(picture.width * picture.height) or [], reverse=True, key=lambda each: each[0])
    present = [cast(tuple[int, int, int], colour) for _, colour in counted]
    wanted = {(red, green, blue) for red, green, blue in kept}
    exact = [*(colour for colour in present if colour in wanted), *present[: count // 2]]
    others = picture.quantize(count // 4, Image.Quantize.MAXCOVERAGE).getpalette() or []
    return np.array([*exact, *np.reshape(others, (-1, 3)).tolist()], dtype=np.uint8)[:count]


def pictures(address: str, routes: dict[str, str], widths: list[int], themes: list[str], to: Path) -> None:
    """One picture for each view, width and theme, in the folder `to`."""
    to.mkdir(exist_ok=True)
    executable = shutil.which("chromium")
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=executable, args=FLAGS) as browser:
        for width in widths:
            for theme in themes:
                size = ViewportSize(width=width, height=WIDTHS[width])
                context = browser.new_context(viewport=size, color_scheme="dark" if theme == "dark" else "light")
                page = context.new_page()
                page.goto(address)
                for view, route in routes.items():
                    page.goto(f"{address.partition('?')[0]}#/{route}")
                    page.wait_for_selector(f'#main[data-route="#/{route}"]')
                    page.wait_for_selector('#connection[data-state="live"]')
                    page.wait_for_timeout(1200)  # curves and drawings
                    take(page, to / f"dashboard-{view}-{width}-{theme}.png", PARTS.get(view))
                context.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("/srv/nimble"))
    parser.add_argument("--to", type=Path, default=IMAGES, help="folder for the pictures (%(default)s)")
    parser.add_argument("--only", action="append", help="a view")
    parser.add_argument("--width", type=int, choices=WIDTHS, action="append")
    parser.add_argument("--theme", choices=THEMES, action="append")
    wanted = parser.parse_args()
    folder = dashboard_history.Folder(wanted.folder)
    if not folder.home.exists():
        dashboard_history.make(folder)
    if not json.loads(folder.nimble("worker", "ls", "--json")):
        dashboard_history.run_on(folder)
    command = [sys.executable, "-m", "nimble_jobs.cli.main", "--home", str(folder.home), "dashboard", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        routes = views(folder)
        chosen = {view: route for view, route in routes.items() if not wanted.only or view in wanted.only}
        address, widths, themes = server.stdout.readline().strip(), wanted.width or WIDTHS, wanted.theme or THEMES
        pictures(address, chosen, list(widths), list(themes), wanted.to)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


if __name__ == "__main__":
    main()
