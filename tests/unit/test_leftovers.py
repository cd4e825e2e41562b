"""What a killed test run has left is removed by a later one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import leftovers


def test_only_old_folders_of_ended_runs_go(tmp_path: Path) -> None:
    """Not those of this run, of one that has just ended, of anything else, nor what a link names."""
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    gone, here = ended.stdout.decode().strip(), os.getpid()
    kept = [f"nimble-jobs-postgres-{here}", f"nimble-jobs-other-{gone}", f"nimble-jobs-tests-{gone}x"]
    for name in [*kept, f"nimble-jobs-postgres-{gone}", f"nimble-jobs-prefork-{gone}-ab", "nimble-jobs-tests-new"]:
        (tmp_path / name / "data").mkdir(parents=True)
        os.utime(tmp_path / name, (0, 0))
    new = tmp_path / f"nimble-jobs-tests-{gone}"
    new.mkdir()
    linked = tmp_path / f"nimble-jobs-prefork-{gone}-link"
    linked.symlink_to(tmp_path / kept[0])
    os.utime(linked, (0, 0), follow_symlinks=False)
    leftovers.sweep(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*kept, new.name, linked.name, "nimble-jobs-tests-new"}
