"""Whole jobs from JPEGs to Parquet: finds the best setting of each system, then measures all in turns. Loads no torch.

Every run is a process of its own, so that nobody inherits a warm process. Rounds go through all systems, so that a host
that gets slower meets everyone.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nimble_jobs.bench.scoring import page_cache, predictions
from nimble_jobs.bench.scoring.ours import Job, picture_input
from nimble_jobs.bench.scoring.request import WITHOUT_GPU, ScoringRequest, Setting, System
from nimble_jobs.bench.scoring.results import ScoringResults, ScoringRow, Trial
from nimble_jobs.bench.scoring.workshop import Workshop
from nimble_jobs.errors import NimbleError

_SEARCHED = 4096  # files that a setting is tried on


class Failed(NimbleError, RuntimeError):
    """A system could not be measured."""


@dataclass(kw_only=True)
class _Contender:
    """A system, as far as it was measured."""

    system: System
    setting: Setting
    searched: list[dict[str, Any]] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    prepare_s: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


def run(
    request: ScoringRequest, folder: Path, files: Sequence[Path], shop: Workshop, environment: dict[str, Any]
) -> ScoringResults:
    """Measure all systems on `files`, all pictures below a folder. A system that fails is a row that says why."""
    return _Run(request, folder, files, shop, environment).all()


class _Run:
    def __init__(
        self,
        request: ScoringRequest,
        folder: Path,
        files: Sequence[Path],
        shop: Workshop,
        environment: dict[str, Any],
    ) -> None:
        self._request = request
        self._folder = folder
        self._files = files
        self._shop = shop
        self._results = ScoringResults(environment=environment)
        self._answers: dict[str, predictions.Answers] = {}
        self._contenders: list[_Contender] = []

    def all(self) -> ScoringResults:
        for system in self._request.asked.systems:
            self._contenders.append(self._tuned(system))
            self._keep()
        for number in range(self._request.asked.rounds):
            for contender in self._contenders:
                if contender.error is None:
                    self._round(contender, number)
                    self._keep()
        return self._results

    def _keep(self) -> None:
        """Make the rows of what is known, and hand them over: a run that is cut off leaves what it has."""
        self._results.agreement = predictions.matrix(self._answers)
        reference = System.EAGER if System.EAGER in self._answers else next(iter(self._answers), None)
        self._results.environment["top1_reference"] = reference
        self._results.rows = [self._row(contender, reference) for contender in self._contenders]
        self._shop.kept(self._results)

    def _tuned(self, system: System) -> _Contender:
        """The system with its best setting."""
        settings = self._request.settings(system)
        contender = _Contender(system=system, setting=settings[0])
        contender.error = self._missing(system)
        if contender.error is not None:
            return contender
        try:
            if system.ours:
                self._built(contender, settings)
            if len(settings) > 1:
                self._search(contender, settings)
        except NimbleError as e:
            contender.error = str(e)
        if contender.error is not None:
            self._shop.told(f"{system}: {contender.error}")
        return contender

    def _missing(self, system: System) -> str | None:
        """Why a system cannot run here."""
        if self._request.device == "cpu" and system in WITHOUT_GPU:
            return WITHOUT_GPU[system]
        if system is System.RAY and importlib.util.find_spec("ray") is None:
            return "not installed; install it with: pip install 'nimble-jobs[ray]'"
        return None

    def _built(self, contender: _Contender, settings: Sequence[Setting]) -> None:
        """Store the schedule of each setting. Raises Failed."""
        contender.prepare_s = 0.0
        for setting in settings:
            self._shop.told(f"{contender.system}: building the schedule for {setting}")
            made, error = self._job(contender.system, setting).build()
            if error is not None:
                raise Failed(error)
            contender.prepare_s += (made or {}).get("build_s") or 0.0

    def _search(self, contender: _Contender, settings: Sequence[Setting]) -> None:
        """Try each setting once, all with cached files; keep the fastest. Raises Failed where none works."""
        page_cache.fill(self._files)
        lines: list[dict[str, Any]] = []
        if contender.system.ours:
            for setting in settings:
                job, ended = self._job(contender.system, setting).run()
                tried: dict[str, Any] = {"batch_size": setting.batch_size, "workers": setting.workers}
                lines.append(tried | ({"error": ended.error} if job is None else {"run_s": job["timings"]["run_s"]}))
            count = len(self._files)
        else:
            count = min(_SEARCHED, len(self._files))
            lines, _, error = self._loop(contender.system, settings, self._files[:count], f"{contender.system}-search")
            if error is not None and len(lines) < len(settings):
                missing = settings[len(lines)]
                lines.append({"batch_size": missing.batch_size, "workers": missing.workers, "error": error})
        for line in lines:
            if "run_s" in line:
                line["records_per_s"] = count / line["run_s"]
        contender.searched = lines
        good = [line for line in lines if "records_per_s" in line]
        if not good:
            raise Failed(lines[0]["error"])
        best = max(good, key=lambda line: line["records_per_s"])
        contender.setting = Setting(batch_size=best["batch_size"], workers=best["workers"])
        self._shop.told(f"{contender.system}: best with {contender.setting}: {best['records_per_s']:,.0f} images/s")

    def _round(self, contender: _Contender, number: int) -> None:
        state = page_cache.arrange(self._files, uncached=self._request.asked.uncached)
        try:
            if contender.system.ours:
                run_s, wall_s, out = self._our_trial(contender)
            else:
                run_s, wall_s, out = self._their_trial(contender)
            if number == 0:
                self._answers[contender.system] = predictions.read(out, self._folder)
        except NimbleError as e:
            contender.error = str(e)
            self._shop.told(f"{contender.system}: {e}")
            return
        contender.trials.append(Trial(run_s=run_s, wall_s=wall_s, files=state))
        rate = len(self._files) / run_s
        self._shop.told(f"round {number + 1}: {contender.system}: {rate:,.0f} images/s, {wall_s:.1f} s in all")

    def _our_trial(self, contender: _Contender) -> tuple[float, float, Path]:
        job = self._job(contender.system, contender.setting)
        row, ended = job.run()
        if row is None:
            raise Failed(ended.error or "no result")
        schedule = row["schedule"] or {}
        contender.facts = {k: schedule.get(k) for k in ("hit", "runs", "in_flight", "streams", "replay_us", "key")}
        if schedule.get("hit") != "stored":
            raise Failed(f"its schedule was not found in the store: {schedule.get('hit')}")
        contender.facts |= {k: row["timings"].get(k) for k in ("load_s", "stages", "bottleneck")}
        manifest = job.manifest()
        contender.facts |= {"decode": manifest["summary"].get("decode"), "bad": manifest["bad"]}
        return row["timings"]["run_s"], ended.wall_s, job.output

    def _their_trial(self, contender: _Contender) -> tuple[float, float, Path]:
        name = str(contender.system)
        lines, wall_s, error = self._loop(contender.system, [contender.setting], self._files, name)
        if error is not None or not lines:
            raise Failed((lines[0].get("error") if lines else None) or error or "no result")
        contender.prepare_s = lines[0]["ready_s"]
        return lines[0]["run_s"], wall_s, self._out(name)

    def _job(self, system: System, setting: Setting) -> Job:
        request = self._request
        decode = "gpu" if system is System.OURS_GPU else "cpu"
        spec = {
            "model": {
                "source": f"torchvision:{request.model}",
                "weights": str(self._shop.weights),
                "dtype": request.dtype,
            },
            "input": picture_input(self._folder, request.side, setting.batch_size, decode),
            "run": {"device": request.device},
        }
        return Job(name=f"{system}-{setting.batch_size}", spec=spec, shop=self._shop)

    def _out(self, name: str) -> Path:
        return self._shop.folder / f"{name}.parquet"

    def _loop(
        self, system: System, settings: Sequence[Setting], files: Sequence[Path], name: str
    ) -> tuple[list[dict[str, Any]], float, str | None]:
        """A line a setting, the seconds of the whole process, and why it failed."""
        request, shop = self._request, self._shop
        asked, result, out = shop.folder / f"{name}.json", shop.folder / f"{name}.jsonl", self._out(name)
        result.unlink(missing_ok=True)
        given = [
            {
                "batch_size": s.batch_size,
                "workers": request.cpus if s.workers is None else s.workers,
                "mode": request.asked.mode,
            }
            for s in settings
        ]
        words: dict[str, Any] = {"loop": system.loop, "model": request.model, "weights": str(self._shop.weights)}
        words |= {"dtype": request.dtype, "device": request.device, "side": request.side, "out": str(out)}
        asked.write_text(json.dumps({**words, "settings": given, "files": [str(file) for file in files]}))
        env = {"RAY_USAGE_STATS_ENABLED": "0"} | ({"TORCHDYNAMO_DISABLE": "1"} if request.device == "cpu" else {})
        ended = shop.module("nimble_jobs.bench.loops", asked, result, env=env)
        lines = [json.loads(line) for line in result.read_text().splitlines()] if result.exists() else []
        return lines, ended.wall_s, ended.error

    def _row(self, contender: _Contender, reference: str | None) -> ScoringRow:
        same = contender.system == reference
        agreement = self._results.agreement.get(contender.system, {}).get(reference or "")
        return ScoringRow(
            model=self._request.model,
            system=contender.system,
            dtype=self._request.dtype,
            batch=contender.setting.batch_size,
            workers=contender.setting.workers,
            records=len(self._files),
            trials=tuple(contender.trials),
            replay_us=contender.facts.get("replay_us"),
            prepare_s=contender.prepare_s,
            searched=tuple(contender.searched),
            same_top1=1.0 if same else agreement.share if agreement else None,
            probability_difference=0.0 if same else agreement.probability if agreement else None,
            facts=contender.facts,
            error=contender.error,
        )
