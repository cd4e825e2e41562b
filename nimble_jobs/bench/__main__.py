"""The process that measures one model: reads units from stdin, writes rows to a pipe. Everything else is its log."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from queue import Queue
from typing import Any

import torch

from nimble_jobs.bench.cell import Cell, model_of
from nimble_jobs.bench.environment import environment, prepare_precision
from nimble_jobs.bench.measure import faulted, measure
from nimble_jobs.bench.memory import tidy
from nimble_jobs.bench.request import Unit
from nimble_jobs.bench.row import failed, in_words
from nimble_jobs.bench.settings import Settings
from nimble_jobs.bench.training_case import case_of
from nimble_jobs.bench.training_cell import TrainingCell
from nimble_jobs.engine import device as devices
from nimble_jobs.errors import UsageError

_SEARCH_SHARE = 0.6  # of a unit's time limit: begun candidates must still end, and the chosen one be measured


class _Server:
    """Keeps the model, and the cell of the newest unit."""

    def __init__(self, options: dict[str, Any], pipe: int) -> None:
        self._options = options
        os.set_inheritable(pipe, False)  # or the compilers' processes would keep it open
        self._pipe = os.fdopen(pipe, "w")
        try:
            self._device = devices.resolve(options["device"], "--device")
        except UsageError as e:
            self._say({"refused": str(e)})
            raise
        self._settings = Settings(
            sample_s=options["sample_s"],
            cold_caches=options["cold_caches"],
            in_flight=tuple(options["in_flight"]),
            idle=options["idle"],
            fuse=options["fuse"],
            search_s=_SEARCH_SHARE * options["limit_s"],
        )
        self._busy = False
        self._lines: Queue[str | None] = Queue()
        self._model: torch.nn.Module | None = None
        self._cell: tuple[tuple[str, int], Cell | TrainingCell] | None = None

    def serve(self) -> None:
        threading.Thread(target=self._listen, name="input", daemon=True).start()
        prepare_precision()
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._say({"environment": environment(self._device), "cuda": self._device.type == "cuda"})
        while (line := self._lines.get()) is not None:
            unit = Unit(**json.loads(line))
            print(f"== {unit} {time.strftime('%H:%M:%S')}", file=sys.stderr, flush=True)  # noqa: T201  # a mark in the log
            self._measure(unit)
            fault = faulted(self._device)
            self._busy = False
            # what profiling leaves behind may slow down what comes next
            self._say({"done": True, "spent": fault or self._settings.idle})

    def _listen(self) -> None:
        """Whoever started this process has gone when its input ends amid a unit: end, with the compilers' processes."""
        for line in sys.stdin:
            self._busy = True
            self._lines.put(line)
        if self._busy:
            os.killpg(os.getpid(), signal.SIGKILL)
        self._lines.put(None)

    def _measure(self, unit: Unit) -> None:
        try:
            cell = self._cell_of(unit)
        except Exception as e:  # noqa: BLE001  # a model that cannot be built is a row, not the end of the run
            traceback.print_exc()
            for row in failed(unit, unit.systems, in_words(e)):
                self._say({"row": dataclasses.asdict(row)})
            return
        for row in measure(cell, unit, self._settings):
            self._say({"row": dataclasses.asdict(row)})

    def _cell_of(self, unit: Unit) -> Cell | TrainingCell:
        key = (unit.dtype, unit.batch)
        if self._cell is None or self._cell[0] != key:
            self._cell = None
            gc.collect()
            tidy(self._device)
            tolerance = self._options["tolerance"]
            cell: Cell | TrainingCell
            if unit.mode == "training":
                cell = TrainingCell(case_of(unit.model), unit.dtype, unit.batch, self._device, tolerance)
            else:
                if self._model is None:
                    self._model = model_of(unit.model)
                cell = Cell(unit.model, self._model, unit.dtype, unit.batch, self._device, tolerance)
            self._cell = (key, cell)
        return self._cell[1]

    def _say(self, message: dict[str, Any]) -> None:
        self._pipe.write(json.dumps(message) + "\n")
        self._pipe.flush()


if __name__ == "__main__":
    _Server(json.loads(sys.argv[2]), int(sys.argv[1])).serve()
