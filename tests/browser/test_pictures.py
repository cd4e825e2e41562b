"""The pictures of the documentation, taken anew from a real history of jobs. With --all only: it takes minutes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests import prefork

REPOSITORY = Path(__file__).resolve().parents[2]
MOST_BYTES = 80_000


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser: install chromium to run this test")
@pytest.mark.skipif(not os.environ.get(prefork.COLD), reason="takes minutes; only with --all")
@pytest.mark.timeout(1800)
def test_every_picture_of_the_documentation_can_be_taken(tmp_path: Path) -> None:
    """Each view, wide and narrow, light and dark: none is missing, too large, or of one colour."""
    script = REPOSITORY / "scripts" / "dashboard_pictures.py"
    words = [sys.executable, str(script), "--folder", str(tmp_path / "nimble"), "--to", str(tmp_path / "images")]
    subprocess.run(words, check=True, timeout=1700)
    taken = {path.name: path for path in (tmp_path / "images").iterdir()}
    assert taken.keys() == {path.name for path in (REPOSITORY / "docs" / "images").glob("dashboard-*.png")}
    for path in taken.values():
        assert path.stat().st_size <= MOST_BYTES
        with Image.open(path) as image:
            assert image.width == (1280 if "-1280-" in path.name else 390) or "timeline" in path.name
            assert len(image.convert("RGB").getcolors(1 << 24) or []) > 8
