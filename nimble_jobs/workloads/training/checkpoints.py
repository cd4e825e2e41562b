"""The checkpoints of one training, in a folder beside its output: which one to go on from, and which ones are kept.

    .NAME.training/0123456789abcdef/step-00000100/     by the digest of what decides the training

Jobs of the same training share the folder: they would write the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nimble_jobs.data.files import remove_tree, reported
from nimble_jobs.data.hidden import DAMAGED, STEP, TEMPORARY, training_root
from nimble_jobs.errors import Damaged
from nimble_jobs.spec.paths import CHECKPOINT
from nimble_jobs.workloads.training import checkpoint
from nimble_jobs.workloads.training.checkpoint import Checkpoint


@dataclass(frozen=True, kw_only=True)
class Found:
    """The newest checkpoint that is sound, and why newer ones are not."""

    checkpoint: Checkpoint | None
    damaged: tuple[str, ...] = ()


class Checkpoints:
    """A folder of checkpoints. `key` names the training, `owner` the job that writes."""

    def __init__(self, output: Path, key: str, *, owner: str) -> None:
        self.owner = owner
        self._root = training_root(output)
        self.folder = self._root / key

    def path(self, step: int) -> Path:
        """Where the checkpoint after `step` steps is."""
        return self.folder / f"{STEP}{step:08d}"

    def newest(self) -> Found:
        """Hashes checkpoints, the newest first, until one is sound, and so is the best one that it counts on.

        Damaged ones are set aside under another name.
        """
        damaged: list[str] = []
        with reported(self.folder):
            waiting = sorted(self._steps())
            while waiting:
                step = waiting.pop()
                try:
                    found = checkpoint.read(self.path(step))
                    best = found.sheet["progress"]["best"]
                    if best is not None and best["step"] != step:
                        checkpoint.read(self.path(best["step"]))
                    return Found(checkpoint=found, damaged=tuple(damaged))
                except Damaged as e:
                    if not self.path(step).exists():  # another job of this training has newer ones
                        waiting = sorted(self._steps())
                        continue
                    damaged.append(str(e))
                    aside = self.folder / f"{DAMAGED}{step:08d}"
                    remove_tree(aside)
                    self.path(step).rename(aside)
        return Found(checkpoint=None, damaged=tuple(damaged))

    def others(self) -> list[Path]:
        """The newest checkpoint of each other training with the same output."""
        found = []
        for folder in sorted(self._root.glob("*")):
            if folder != self.folder:
                found += sorted(p for p in folder.glob(f"{STEP}*") if (p / CHECKPOINT).is_file())[-1:]
        return found

    def prune(self, step: int, keep_last: int, best: int | None) -> None:
        """Of those up to `step`, remove all but the last ones and that of step `best`. Later ones are another job's."""
        with reported(self.folder):
            for old in sorted(s for s in self._steps() if s <= step)[:-keep_last]:
                if old != best:
                    aside = checkpoint.aside(self.path(old), self.owner)
                    self.path(old).rename(aside)  # what is half removed must not look damaged
                    remove_tree(aside)

    def clear(self) -> None:
        """Remove the training's folder, and the one around it if nothing else is there."""
        with reported(self.folder):
            remove_tree(self.folder)
            try:
                self._root.rmdir()
            except OSError:  # not there, or with checkpoints of another training
                return

    def tidy(self) -> None:
        """Remove what attempts of this job that died left half written."""
        with reported(self.folder):
            for path in self.folder.glob(f"{TEMPORARY}{self.owner}-*"):
                remove_tree(path)

    def _steps(self) -> list[int]:
        names = [p.name.removeprefix(STEP) for p in self.folder.glob(f"{STEP}*")]
        return [int(name) for name in names if name.isdigit()]
