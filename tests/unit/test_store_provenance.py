"""Which commit built a schedule, read from a checkout's files."""

from __future__ import annotations

from pathlib import Path

from nimble_jobs import __version__
from nimble_jobs.store.provenance import checked_out, provenance

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_commit(tmp_path: Path) -> None:
    """A branch, a packed branch, a detached head; no checkout, an empty one, or nonsense give none."""
    git = tmp_path / ".git"
    assert checked_out(git) is None
    (git / "refs" / "heads").mkdir(parents=True)
    assert checked_out(git) is None
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert checked_out(git) is None
    (git / "packed-refs").write_text(
        f"# pack-refs with: peeled\n{'f' * 40} refs/heads/other\n{COMMIT} refs/heads/main\n"
    )
    assert checked_out(git) == COMMIT
    (git / "refs" / "heads" / "main").write_text(f"{'a' * 40}\n")
    assert checked_out(git) == "a" * 40
    (git / "HEAD").write_text(f"{COMMIT}\n")
    assert checked_out(git) == COMMIT
    (git / "HEAD").write_text("somewhere\n")
    assert checked_out(git) is None


def test_facts() -> None:
    """Version, Python and host are always there."""
    facts = provenance()
    assert facts["nimble_jobs"] == __version__
    assert facts.keys() >= {"python", "host"}
