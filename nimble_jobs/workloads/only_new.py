"""`input.only_new`: which files a scoring job takes, and which of them count as seen afterwards."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nimble_jobs.data import BadRecord, Reader, check_writable
from nimble_jobs.data.file_list import find_list, keep_list
from nimble_jobs.data.listing import list_input, root_of
from nimble_jobs.data.publish import outputs, published
from nimble_jobs.data.stamps import Stamps
from nimble_jobs.errors import DataError, OutOfStep, OutputExists
from nimble_jobs.job import JobState
from nimble_jobs.models import identity, weights_identity
from nimble_jobs.seen import CHANGED, UNSCORED, VANISHED, Counts, FileList, InputFile, Kind, Scored, kind_of
from nimble_jobs.spec import ModelSpec
from nimble_jobs.spec.model import OnlyNewSpec
from nimble_jobs.store import Wait
from nimble_jobs.workloads.bad_records import enforce_threshold, in_failed_shard
from nimble_jobs.workloads.context import JobContext, Outcome
from nimble_jobs.workloads.waiting import go_on, told_once, who

_NAMED = 3  # files in a message
_ASK_EVERY = 1000  # files between two questions whether the job should stop


@dataclass(frozen=True, kw_only=True)
class Work:
    """The files that this attempt scores."""

    files: FileList
    model: str  # identity of the model, SHA-256 in hex

    def scored(self, left: dict[str, str]) -> Scored:
        """What counts as seen once the job has succeeded: the whole list without those left."""
        files = [file for file in self.files.files if file.path not in left]
        return Scored(
            root=self.files.root,
            model=self.model,
            listed_at=self.files.listed_at,
            after_run=self.files.after_run,
            files=files,
        )

    def counts(self, left: dict[str, str]) -> Counts:
        """The counts of the list, with what has happened to its files since."""
        of = Counter(left.values())
        return dataclasses.replace(self.files.counts, vanished=of[VANISHED], moved=of[CHANGED], failed=of[UNSCORED])

    def summary(self, left: dict[str, str]) -> dict[str, Any]:
        """What the manifest says: enough for another process to mark the files, if this one dies before it can."""
        return {"model": self.model, "left": left, "counts": self.counts(left).to_json()}


def choose(context: JobContext, *, now: float) -> Work | Outcome:
    """The files to score, from the list of an earlier attempt or a new one; an outcome if nothing is left to do.

    Raises DataError if the input cannot be listed, if files changed under `changed: fail`, or if too many are gone;
    OutOfStep for a member whose job has no list.
    """
    spec, job = context.spec, context.job
    files = find_list(spec.output.folder, job.id)
    if job.joined:
        if files is None:
            raise OutOfStep(f"{spec.output.path}: the list of the job's files is gone")
        return Work(files=files, model=model_identity(spec.model))
    if (ended := _published(context, files)) is not None:
        return ended
    model = model_identity(spec.model)
    if files is None:
        files = _new_list(context, model, now)
        context.event("only-new", files.counts.words(), files.counts.to_json())
        if not files.files:
            return _empty(context, Work(files=files, model=model), {})
    work = Work(files=files, model=model)
    left = gone(files)
    if len(left) == len(files.files):
        bad = [BadRecord(index=i, id=path, reason=left[path]) for i, path in enumerate(left)]
        enforce_threshold(spec.run, len(bad), len(bad), bad, what="files")
        return _empty(context, work, left)
    return work


def left_over(work: Work, reader: Reader, bad: list[BadRecord]) -> dict[str, str]:
    """Files of the list that must not count as seen, with the reason: they changed between listing and reading, or
    records of theirs were in a shard that failed, perhaps because of others.

    `bad` holds the bad records of all shards, also of earlier attempts.
    """
    failed = {reader.listed_file(b.index): UNSCORED for b in bad if in_failed_shard(b.reason)}
    passing = {b.id: b.reason for b in bad if b.reason in (VANISHED, CHANGED)}
    unread = {path: reason for path, reason in reader.left_out.items() if reason in (VANISHED, CHANGED)}
    return failed | gone(work.files) | unread | passing


def gone(files: FileList) -> dict[str, str]:
    """Files that vanished or changed since they were listed: VANISHED or CHANGED by path."""
    return Stamps.listed(Path(files.root), files.files).moved()


def finish(context: JobContext, outcome: Outcome, work: Work, left: dict[str, str]) -> Outcome:
    """The outcome with the counts and the files that count as seen, as the manifest of the published folder says.

    If another attempt published first, it is that attempt's manifest.
    """
    there = published(context.spec.output.folder, context.job.id, context.store.publications)
    manifest = {} if there is None else there.manifest
    said = manifest.get("summary", {}).get("only_new") or work.summary(left)
    moved = [path for path, reason in said["left"].items() if reason != UNSCORED]
    failed = [path for path, reason in said["left"].items() if reason == UNSCORED]
    if moved:
        files = "file was" if len(moved) == 1 else "files were"
        text = f"{len(moved):,} {files} gone or changed when read; the next run checks again: {_few(moved)}"
        context.event("moved", text, {})
    if failed:
        files = "file was" if len(failed) == 1 else "files were"
        text = f"{len(failed):,} {files} in shards that failed; the next run scores them: {_few(failed)}"
        context.event("unscored", text, {})
    scored = Work(files=work.files, model=said["model"]).scored(said["left"])
    return dataclasses.replace(outcome, scored=scored, outputs=outcome.outputs | {"only_new": said["counts"]})


def model_identity(model: ModelSpec) -> str:
    """SHA-256, in hex, of everything that decides what the model computes: code, arguments, dtype and weights."""
    parts = {**identity(model), "weights": weights_identity(model)}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _new_list(context: JobContext, model: str, now: float) -> FileList:
    """List the input and compare it with what was seen. Only one job of a name does so at a time."""
    spec, wanted = context.spec, context.spec.input.only_new
    assert wanted is not None
    context.report(phase="list")
    root = str(root_of(spec.input.source).resolve())
    kinds: Counter[Kind] = Counter()
    files: list[InputFile] = []
    changed: list[str] = []
    unusable: list[str] = []
    with context.store.builds.turn(
        _lock_key(spec.name), limit_s=float("inf"), waiting=told_once(context, partial(_tell, context))
    ):
        others = _elsewhere(context, root)
        after_run = context.store.seen.newest_run(spec.name, root)
        listed = _watched(context, list_input(spec.input))
        for file, seen in context.store.seen.compare(spec.name, root, listed):
            kind = kind_of(
                file,
                seen,
                model=model,
                settle_s=wanted.settle,
                changed=wanted.changed,
                model_change=wanted.model_change,
                now=now,
            )
            if kind.wanted and others.get(file.path) == file.version:
                kind = Kind.ELSEWHERE
            kinds[kind] += 1
            if kind.wanted:
                files.append(file)
            if kind is Kind.CHANGED:
                changed.append(file.path)
            elif kind is Kind.UNUSABLE:
                unusable.append(file.path)
        _refuse_changed(wanted, changed)
        counts = Counts(listed=kinds.total(), **{kind.value: n for kind, n in kinds.items()})
        files.sort(key=lambda file: file.path)
        new = FileList(root=root, listed_at=now, after_run=after_run, counts=counts, files=files)
        if files:
            new = _keep(context, new)  # before the next job lists
    if unusable:
        what = "a file" if len(unusable) == 1 else "files"
        text = f"left out {len(unusable):,}, not readable as {what}: {_few(sorted(unusable))}"
        context.event("unusable", text, {})
    return new


def _keep(context: JobContext, files: FileList) -> FileList:
    output, job = context.spec.output, context.job

    def keep() -> FileList:
        try:
            check_writable(output, context.store.publications, job.id)
        except OutputExists as e:
            if output.folder.is_symlink():
                raise
            how = "output.path=FOLDER after the spec, or a template of the tick with cron"
            raise OutputExists(
                f"{output.path}: exists already; expected a folder of its own for each run of input.only_new: {how}"
            ) from e
        return keep_list(output.folder, job.id, job.attempt, files)

    return context.patience.through(keep, begun=False)


def _refuse_changed(wanted: OnlyNewSpec, changed: list[str]) -> None:
    if wanted.changed == "fail" and changed:
        verb, them = ("files have", "them") if len(changed) > 1 else ("file has", "it")
        raise DataError(
            f"input.only_new.changed: {len(changed):,} {verb} changed since an earlier run scored {them}: "
            f"{_few(sorted(changed))}; expected unchanged files, or changed: rescore or ignore"
        )


def _elsewhere(context: JobContext, root: str) -> dict[str, tuple[int, int]]:
    """Files on the lists of other jobs of this name that have not ended, each with its version."""
    listed: dict[str, tuple[int, int]] = {}
    open_states = (JobState.QUEUED, JobState.RUNNING)
    for other in context.store.jobs.list(states=open_states, name=context.job.name):
        path = other.spec.get("output", {}).get("path")
        if other.id == context.job.id or not other.attempt or not path:
            continue
        files = find_list(Path(path), other.id)
        if files is not None and files.root == root:
            listed |= {file.path: file.version for file in files.files}
    return listed


def _published(context: JobContext, files: FileList | None) -> Outcome | None:
    """The outcome if an earlier attempt published the output and died before it could say so."""
    path = context.spec.output.folder
    there = published(path, context.job.id, context.store.publications)
    if there is None:
        return None
    manifest = there.manifest
    context.event("published", f"{path} already holds this job's output", {})
    context.report(total=manifest["records"] + manifest["bad"], done=manifest["records"] + manifest["bad"])
    outcome = Outcome(outputs=outputs(path, manifest), publication=there.publication)
    said = manifest["summary"].get("only_new")
    if files is None or said is None:
        text = "the list of its files is gone, so none of them counts as seen; the next run scores them again"
        context.event("list-gone", text, {})
        return outcome
    scored = Work(files=files, model=said["model"]).scored(said["left"])
    return dataclasses.replace(outcome, scored=scored, outputs=outcome.outputs | {"only_new": said["counts"]})


def _empty(context: JobContext, work: Work, left: dict[str, str]) -> Outcome:
    """Nothing to score: the job succeeds, publishes nothing and makes no folder."""
    context.report(total=0, done=0)
    counts = work.counts(left)
    return Outcome(outputs={"empty": True, "only_new": counts.to_json()}, empty=True)


def _watched(context: JobContext, files: Iterable[InputFile]) -> Iterator[InputFile]:
    """The same files. Raises Stopped if the job is to end meanwhile."""
    for i, file in enumerate(files):
        if i % _ASK_EVERY == 0:
            go_on(context)
        yield file


def _tell(context: JobContext, wait: Wait) -> None:
    text = f"{who(wait)} is listing the input of another job with this name; this job waits until it has finished"
    context.event("wait", text, {})


def _lock_key(name: str) -> str:
    """One key for each name, as lock files are never removed; a template's folders would make many."""
    return f"list-{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def _few(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
