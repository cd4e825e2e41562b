"""One model: finds the best setting of each loop, then measures all systems in turns. Loads no torch.

Every run is a process of its own, from a file of texts to a file of embeddings. Rounds go through all systems, so that
a host that gets slower meets everyone.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from nimble_jobs import plural
from nimble_jobs.bench.scoring.ours import Job
from nimble_jobs.bench.scoring.process import Ended
from nimble_jobs.bench.scoring.workshop import Workshop
from nimble_jobs.bench.text import agreement
from nimble_jobs.bench.text.peak import Peak
from nimble_jobs.bench.text.request import WITHOUT_GPU, TextSetting, TextSystem, TextWanted
from nimble_jobs.bench.text.results import TextRow, TextTrial
from nimble_jobs.errors import NimbleError


class Failed(NimbleError, RuntimeError):
    """A system could not be measured."""


class TooSlow(Failed):
    """A system took longer than the time limit."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """One model on one device, and its texts."""

    wanted: TextWanted
    model: str  # as the user named it
    folder: Path
    texts: Path
    count: int
    tokens: int
    dtype: str
    device: str  # cpu | cuda


@dataclass(kw_only=True)
class _Contender:
    system: TextSystem
    setting: TextSetting | None = None
    searched: list[dict[str, Any]] = field(default_factory=list)
    trials: list[TextTrial] = field(default_factory=list)
    prepare_s: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    embeddings: agreement.Embeddings | None = None
    unbuilt: str | None = None  # ours, stored: why not all schedules were built
    note: str | None = None
    error: str | None = None


def run(place: Place, shop: Workshop, kept: Callable[[list[TextRow]], None]) -> list[TextRow]:
    """Measure all systems. A system that fails is a row that says why. `kept` gets the rows after every run."""
    return _Run(place, shop, kept).all()


class _Run:
    def __init__(self, place: Place, shop: Workshop, kept: Callable[[list[TextRow]], None]) -> None:
        self._place = place
        self._shop = shop
        self._kept = kept
        self._contenders: list[_Contender] = []

    def all(self) -> list[TextRow]:
        for system in self._place.wanted.systems:
            self._contenders.append(self._tuned(system))
            self._kept(self._rows())
        for number in range(self._place.wanted.rounds):
            for contender in self._contenders:
                if contender.error is None:
                    self._round(contender, number)
                    self._kept(self._rows())
        return self._rows()

    def _tuned(self, system: TextSystem) -> _Contender:
        """The system with its best setting; ours also with its schedules stored."""
        settings = self._place.wanted.settings(system)
        contender = _Contender(system=system, setting=settings[0] if settings else None)
        contender.error = self._missing(system)
        if contender.error is None:
            try:
                if system is TextSystem.STORED:
                    self._build(contender)
                if len(settings) > 1:
                    self._search(contender, settings)
            except NimbleError as e:
                contender.error = str(e)
        if contender.error is not None:
            self._shop.told(f"{system}: {contender.error}")
        return contender

    def _build(self, contender: _Contender) -> None:
        """Store the schedules, in a state folder that has none. If that fails or takes too long, some are missing."""
        self._shop.told(f"{contender.system}: building the schedules")
        job = self._emptied(contender.system)
        begin = time.perf_counter()
        _, contender.unbuilt = job.build()
        contender.prepare_s = time.perf_counter() - begin
        if contender.unbuilt is not None:
            self._shop.told(f"{contender.system}: building: {contender.unbuilt}; goes on with what is stored")

    def _missing(self, system: TextSystem) -> str | None:
        """Why a system cannot run here."""
        if self._place.device == "cpu" and system in WITHOUT_GPU:
            return WITHOUT_GPU[system]
        if system is TextSystem.SENTENCE_TRANSFORMERS and importlib.util.find_spec("sentence_transformers") is None:
            return "not installed; install it with: pip install 'nimble-jobs[sentence-transformers]'"
        return None

    def _search(self, contender: _Contender, settings: list[TextSetting]) -> None:
        """Try each setting once over the first texts; keep the fastest after its start. A mode of torch.compile that
        takes too long with one batch size is not tried with others. Raises Failed if none works.
        """
        count = min(self._place.wanted.searched, self._place.count)
        few = self._shop.folder / f"searched-{count}.parquet"
        pq.write_table(pq.read_table(self._place.texts).slice(0, count), few)
        best = None
        slow: dict[str, str] = {}  # modes that took too long, with the reason
        for setting in settings:
            line: dict[str, Any] = {"batch_size": setting.batch_size, "mode": setting.mode}
            contender.searched.append(line)
            if setting.mode in slow:
                line["error"] = f"not tried: {slow[setting.mode]}"
                continue
            try:
                trial, _ = self._loop(contender.system, setting, few)
            except Failed as e:
                if isinstance(e, TooSlow):
                    slow[setting.mode] = f"{setting}: {e}"
                line["error"] = str(e)
                continue
            line["start_s"], line["texts_per_s"] = trial.start_s, count / (trial.wall_s - trial.start_s)
            if best is None or line["texts_per_s"] > best[0]:
                best = line["texts_per_s"], setting
        if best is None:
            raise Failed(contender.searched[0]["error"])
        contender.setting = best[1]
        self._shop.told(f"{contender.system}: best with {best[1]}: {best[0]:,.0f} texts/s after its start")

    def _round(self, contender: _Contender, number: int) -> None:
        try:
            if contender.setting is None:
                trial, out = self._ours(contender)
            else:
                trial, out = self._loop(contender.system, contender.setting, self._place.texts)
            if number == 0:
                contender.embeddings = agreement.read(out)
        except NimbleError as e:
            contender.error = str(e)
            self._shop.told(f"{contender.system}: {e}")
            return
        contender.trials.append(trial)
        rate = self._place.count / trial.wall_s
        self._shop.told(
            f"round {number + 1}: {contender.system}: {rate:,.0f} texts/s end to end, {trial.wall_s:.1f} s in all, "
            f"first result after {trial.start_s:.1f} s"
        )

    def _ours(self, contender: _Contender) -> tuple[TextTrial, Path]:
        job = (self._emptied if contender.system is TextSystem.EMPTY else self._job)(contender.system)
        with Peak() as peak:
            row, ended = replace(job, shop=replace(job.shop, seen=peak.watch)).run()
        if row is None:
            raise (TooSlow if ended.late else Failed)(ended.error or "no result")
        schedule, timings = row["schedule"] or {}, row["timings"]
        contender.facts |= {k: schedule.get(k) for k in ("hit", "runs", "buckets", "key")} | {"timings": timings}
        if contender.system is TextSystem.STORED:
            contender.note = _stored(schedule["buckets"], contender.unbuilt)
        # What comes before the run, and what is published after it, is counted as the start.
        start_s = ended.wall_s - timings["run_s"] + timings.get("first_s", 0.0)
        return self._trial(ended, start_s, peak, _padded(timings)), job.output

    def _loop(self, system: TextSystem, setting: TextSetting, texts: Path) -> tuple[TextTrial, Path]:
        """Raises Failed."""
        place, shop = self._place, self._shop
        asked, result = shop.folder / f"{system}.json", shop.folder / f"{system}-result.json"
        out = shop.folder / f"{system}.parquet"
        result.unlink(missing_ok=True)
        given: dict[str, Any] = {
            "loop": system.loop,
            "texts": str(texts),
            "model": str(place.folder),
            "dtype": place.dtype,
        }
        given |= {"device": place.device, "max_length": place.wanted.max_length, "out": str(out)}
        asked.write_text(json.dumps(given | {"batch_size": setting.batch_size, "mode": setting.mode}))
        with Peak() as peak:
            began = time.time()
            ended = replace(shop, seen=peak.watch).module("nimble_jobs.bench.text.loops", asked, result)
        answer = json.loads(result.read_text()) if result.exists() else {}
        if ended.late:
            raise TooSlow(ended.error or "no result")
        if ended.error is not None or "error" in answer or answer.get("first_at") is None:
            raise Failed(answer.get("error") or ended.error or "no result")
        return self._trial(ended, answer["first_at"] - began, peak, answer["padded_tokens"]), out

    def _trial(self, ended: Ended, start_s: float, peak: Peak, padded: int | None) -> TextTrial:
        return TextTrial(
            wall_s=ended.wall_s,
            start_s=start_s,
            host_peak_bytes=peak.host_bytes,
            device_peak_bytes=peak.device_bytes,
            padded_tokens=padded,
        )

    def _emptied(self, system: TextSystem) -> Job:
        """A job without a schedule and without an output, which the emptied state folder would not know as its own."""
        job = self._job(system)
        shutil.rmtree(job.shop.home)
        job.shop.home.mkdir(mode=0o700)
        if job.output.exists():
            shutil.rmtree(job.output)
        return job

    def _job(self, system: TextSystem) -> Job:
        place = self._place
        text = {"max_length": place.wanted.max_length, **place.wanted.ours}
        spec = {
            "model": {"source": f"transformers:{place.folder}", "dtype": place.dtype},
            "input": {
                "source": str(place.texts),
                "format": "text",
                "fields": {"x": "text", "id": "id"},
                "text": text,
            },
            "run": {"device": place.device},
        }
        output = {"fields": ["id", "embedding"], "pooling": "mean", "normalize": True}
        shop = replace(self._shop, home=self._shop.home.with_name(f"{self._shop.home.name}-{system}"))
        shop.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Job(name=str(system), spec=spec, shop=shop, output_spec=output)

    def _rows(self) -> list[TextRow]:
        by_system = {contender.system: contender.embeddings for contender in self._contenders}
        order = (TextSystem.EAGER, TextSystem.SENTENCE_TRANSFORMERS, *TextSystem)
        reference = next((system for system in order if by_system.get(system) is not None), None)
        return [self._row(contender, by_system[reference] if reference else None) for contender in self._contenders]

    def _row(self, contender: _Contender, reference: agreement.Embeddings | None) -> TextRow:
        place, setting, found = self._place, contender.setting, contender.embeddings
        off = None if found is None or reference is None else agreement.farthest(found, reference)
        return TextRow(
            model=place.model,
            system=contender.system,
            dtype=place.dtype,
            device=place.device,
            batch=setting.batch_size if setting else None,
            compile_mode=setting.mode if setting and contender.system is TextSystem.COMPILED else None,
            texts=place.count,
            tokens=place.tokens,
            trials=tuple(contender.trials),
            prepare_s=contender.prepare_s,
            searched=tuple(contender.searched),
            relative_norm=off,
            facts=contender.facts,
            note=contender.note,
            error=contender.error,
        )


def _stored(buckets: Sequence[Mapping[str, Any]], unbuilt: str | None) -> str | None:
    """Which of the buckets' schedules were in the store, unless all were. Raises Failed if none was."""
    hits = sum(bucket["hit"] == "stored" for bucket in buckets)
    why = f"; building: {unbuilt}" if unbuilt is not None else ""
    if not hits:
        raise Failed(f"the schedules of {plural.count(len(buckets), 'bucket')} were not found in the store{why}")
    return (
        f"schedules of {hits} of {plural.count(len(buckets), 'bucket')} were stored{why}"
        if hits < len(buckets)
        else None
    )


def _padded(timings: dict[str, Any]) -> int:
    """Tokens of all batches of our job, padding included."""
    text = timings["text"]
    return int(text["tokens"] / (1 - text["padding_share"]))
