"""Takes the pictures of docs/images/dashboard-*.png: every view of the dashboard, wide and narrow, light and dark.

    scripts/dashboard_pictures.py [--folder /srv/nimble] [--only VIEW] [--width 390] [--theme dark]

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
from PIL import Image
from playwright.sync_api import Page, ViewportSize, sync_playwright

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
WIDTHS = {1280: 800, 390: 844}  # and the heights of the screens
TALLEST = 2200
THEMES = ("light", "dark")
COLOURS = (96, 48, 32)  # fewer if the file would be larger than that
LARGEST = 80 * 1024


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
        "failed": f"job/{newest('state=failed')}",
        "store": "store",
        "schedule": f"store/{sound}",
        "timers": "timers",
        "timer": "timers/inbox-watch",
        "workers": "workers",
    }


def take(page: Page, path: Path) -> None:
    """The whole page, as far as it is not too tall, with few colours."""
    height = min(TALLEST, page.evaluate("document.documentElement.scrollHeight"))
    width = page.viewport_size["width"] if page.viewport_size else 0
    data = page.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": width, "height": height})
    save(Image.open(io.BytesIO(data)).convert("RGB"), path)
    print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")


def save(picture: Image.Image, path: Path) -> None:
    """Write it with as many colours as a small file allows."""
    for colours in COLOURS:
        picture.quantize(palette=_palette(picture, colours), dither=Image.Dither.NONE).save(path, optimize=True)
        if path.stat().st_size <= LARGEST:
            break


def _palette(picture: Image.Image, count: int) -> Image.Image:
    """Backgrounds and text keep their very colours; the rest are near to what is there."""
    exact = count * 3 // 4
    counted = sorted(picture.getcolors(picture.width * picture.height) or [], reverse=True, key=lambda each: each[0])
    colours = [band for _, colour in counted[:exact] for band in cast(tuple[int, int, int], colour)]
    others = picture.quantize(count - exact, Image.Quantize.MAXCOVERAGE).getpalette() or []
    palette = Image.new("P", (1, 1))
    palette.putpalette(colours + others[: 3 * (count - exact)])
    return palette


def pictures(address: str, routes: dict[str, str], widths: list[int], themes: list[str]) -> None:
    """One picture for each view, width and theme."""
    IMAGES.mkdir(exist_ok=True)
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
                    take(page, IMAGES / f"dashboard-{view}-{width}-{theme}.png")
                context.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("/srv/nimble"))
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
        pictures(server.stdout.readline().strip(), chosen, wanted.width or list(WIDTHS), wanted.theme or list(THEMES))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


if __name__ == "__main__":
    main()
