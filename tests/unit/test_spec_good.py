"""Specs that are right: what they become, how paths, overrides and defaults work, and the way to JSON and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nimble_jobs import spec
from nimble_jobs.errors import SpecError
from nimble_jobs.spec.fields import KNOWN_OUTPUTS, AfterSpec
from tests.bad_specs import FINETUNE, SCORE, edit, lay_out

FULL_SCORE = """\
version: 1
name: digits-score
kind: score
model:
  source: torchvision:resnet18
  args: {num_classes: 10, widths: [1, 2.5, null, true, text], nested: {a: 1e-5}}
  weights: ../out/digits/model.safetensors
  seed: 3
  dtype: fp16
input:
  source: digits.npz
  format: npz
  fields: {x: images, id: ids, label: labels}
  batch_size: 64
  transform: {resize: 32, center_crop: [28, 24], channels: 3, scale: 0.0625, mean: [0.5], std: [0.5], layout: hwc}
  allow_nan: true
schedule:
  on_miss: fail
  streams: auto
  fuse: off
  in_flight: 1
  budget: 2m
  tolerance: 1.0e-3
output:
  path: ../out/digits-score
  format: jsonl
  fields: [id, label, top1, top5, probability, logits, embedding, boxes]
  if_exists: resume
  shard_size: 10
run:
  device: cuda:1
  priority: -3
  after: [digits-train, 01hx]
  key: tonight
  timeout: 2h
  error_threshold: 0.5
  retry: {max_attempts: 5, backoff: constant, initial: 5s, max: 10m}
cron: null
train: null
"""

FULL_TRAIN = (
    FINETUNE
    + """\
  loss: cross_entropy
  optimizer: {name: sgd, lr: 5e-2, momentum: 0.9, nesterov: true, weight_decay: 0}
  label_smoothing: 0.1
  lr_schedule: {name: cosine, warmup_steps: 50}
  clip_norm: 1.0
  accumulate: 2
  last_batch: drop
  freeze: [conv1.*, bn1.*]
  augment: {crop_padding: 2, flip: horizontal}
  init_from: old.pt
  resume: never
  checkpoint: {every_steps: 100, keep_last: 3, best: val_accuracy}
  validation: {source: digits.npz, every_epochs: 1}
  early_stopping: {metric: val_loss, patience: 3, min_delta: 1e-3}
  tensorboard: true
"""
)


def loads(text: str, base: Path, *overrides: str) -> spec.JobSpec:
    return spec.loads(text, "job.yaml", base, overrides, check_files=False)


def test_every_field_of_a_scoring(tmp_path: Path) -> None:
    """Each field arrives typed; paths are absolute, durations seconds, one size a pair."""
    base = tmp_path / "jobs"
    job = loads(FULL_SCORE, base)
    assert job.model.args == {"num_classes": 10, "widths": [1, 2.5, None, True, "text"], "nested": {"a": 1e-5}}
    assert job.model.weights == str(tmp_path / "out/digits/model.safetensors")
    assert (job.model.seed, job.model.dtype) == (3, "fp16")
    assert job.input.source == str(base / "digits.npz")
    assert (job.input.fields.x, job.input.fields.id, job.input.fields.label) == ("images", "ids", "labels")
    transform = job.input.transform
    assert (transform.resize, transform.center_crop, transform.mean, transform.scale) == (
        (32, 32),
        (28, 24),
        (0.5,),
        0.0625,
    )
    assert (job.schedule.on_miss, job.schedule.fuse, job.schedule.in_flight) == ("fail", "off", 1)
    assert (job.schedule.tolerance, job.schedule.budget) == (1e-3, 120.0)
    assert job.output.path == tmp_path / "out/digits-score"
    assert job.output.fields == ("id", "label", "top1", "top5", "probability", "logits", "embedding", "boxes")
    assert (job.run.device, job.run.priority, job.run.after) == ("cuda:1", -3, ("digits-train", "01hx"))
    assert (job.run.timeout, job.run.retry.initial, job.run.retry.max) == (7200.0, 5.0, 600.0)
    assert job.train is None


def test_every_field_of_a_fine_tuning(tmp_path: Path) -> None:
    """A fine-tuning is typed as well."""
    job = loads(FULL_TRAIN, tmp_path)
    assert job.train is not None
    assert job.train.validation is not None
    assert (job.train.epochs, job.train.resume) == (5, "never")
    assert (job.train.optimizer.lr, job.train.optimizer.weight_decay) == (0.05, 0.0)
    assert job.train.init_from == str(tmp_path / "old.pt")
    assert job.train.validation.source == str(tmp_path / "digits.npz")
    assert job.train.checkpoint is not None
    assert (job.train.checkpoint.every_steps, job.train.checkpoint.epochs) == (100, None)
    assert (job.train.freeze, job.train.augment.crop_padding) == (("conv1.*", "bn1.*"), 2)


def test_random_parts_of_pictures(tmp_path: Path) -> None:
    """true stands for the usual ranges, false for none; whole numbers are taken too."""
    usual = ((0.08, 1.0), (0.75, 1.3333))
    for text, expected in (
        ("true", usual),
        ("{}", usual),
        ("{scale: [0.5, 1]}", ((0.5, 1.0), usual[1])),
        ("{ratio: [1, 1]}", (usual[0], (1.0, 1.0))),
        ("false", None),
        ("null", None),
    ):
        job = loads(FINETUNE + f"  augment: {{random_resized_crop: {text}}}\n", tmp_path)
        assert job.train is not None
        found = job.train.augment.random_resized_crop
        assert (None if found is None else (found.scale, found.ratio)) == expected


def test_defaults_of_a_fine_tuning(tmp_path: Path) -> None:
    """Without a word about it, a training is kept after each epoch and goes on by itself; null keeps nothing."""
    job = loads(FINETUNE, tmp_path)
    assert job.train is not None
    assert job.train.checkpoint is not None
    assert (job.train.resume, job.train.checkpoint.epochs, job.train.checkpoint.keep_last) == ("auto", 1, 2)
    bare = loads(FINETUNE + "  checkpoint: null\n  loss: python:l.py:fn\n", tmp_path)
    assert bare.train is not None
    assert bare.train.checkpoint is None
    assert bare.train.loss == f"python:{tmp_path}/l.py:fn"


def test_defaults(tmp_path: Path) -> None:
    """What is not given has the documented default."""
    job = loads(SCORE, tmp_path)
    assert (job.schedule.on_miss, job.schedule.streams, job.output.format, job.output.if_exists) == (
        "build",
        "auto",
        "parquet",
        "fail",
    )
    assert job.output.fields == ("id", "top1", "probability")
    assert (job.run.timeout, job.run.error_threshold, job.run.retry.max_attempts) == (None, 0.0, 3)


def test_load_is_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths start at the spec's folder wherever the command runs, those of overrides too."""
    jobs = tmp_path / "jobs"
    lay_out(jobs)
    (jobs / "job.yaml").write_text(SCORE)
    monkeypatch.chdir(tmp_path)
    job = spec.load(Path("jobs/job.yaml"), ["input.source=scans/a.npz"])
    assert job.input.source == str(jobs / "scans/a.npz")
    assert job.output.path == tmp_path / "out/digits-score"


def test_files_that_an_earlier_job_makes(tmp_path: Path) -> None:
    """Weights and input may be missing where the job waits for others."""
    text = edit(("digits.npz", "later.npz"), ("args: {num_classes: 10}", "weights: later.pt"))
    with pytest.raises(SpecError, match=r"later\.pt(.|\n)*later\.npz"):
        spec.loads(text, "job.yaml", tmp_path)
    assert spec.loads(text, "job.yaml", tmp_path, ["run.after=[maker]"]).run.after == ("maker",)


def test_waits_and_groups(tmp_path: Path) -> None:
    """A wait for success is the name alone, however it was written; stored and restored, all stay as they were."""
    lay_out(tmp_path)
    given = ["run.after=[a, {job: b}, {job: c, when: failure}]", "run.group={name: gpu, limit: 2}"]
    job = spec.loads(SCORE, "job.yaml", tmp_path, given)
    assert job.run.after == ("a", "b", AfterSpec(job="c", when="failure"))
    assert spec.dump(job)["run"]["after"] == ["a", "b", {"job": "c", "when": "failure"}]
    assert spec.dump(job)["run"]["group"] == {"name": "gpu", "limit": 2}
    assert spec.restore(spec.dump(job)) == job


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("torchvision:resnet18", "torchvision:resnet18"),
        ("timm:vit_base_patch16_224.augreg_in21k", "timm:vit_base_patch16_224.augreg_in21k"),
        ("transformers:bert", "transformers:{base}/bert"),
        ("python:nets/a.py:make", "python:{base}/nets/a.py:make"),
        ("python:/nets/a:b.py:make", "python:/nets/a:b.py:make"),
        ("exported:../net.pt2", "exported:{parent}/net.pt2"),
    ],
)
def test_sources(source: str, expected: str, tmp_path: Path) -> None:
    """Every kind of source is understood, and its path made absolute."""
    text = edit(("torchvision:resnet18", source), ("  args: {num_classes: 10}\n", ""))
    job = loads(text, tmp_path)
    assert job.model.source == expected.format(base=tmp_path, parent=tmp_path.parent)
    assert str(spec.parse_source(job.model.source)) == job.model.source


def test_weights_by_name(tmp_path: Path) -> None:
    """The name of a torchvision entry stays a name."""
    assert loads(edit(("args: {num_classes: 10}", "weights: IMAGENET1K_V2")), tmp_path).model.weights == "IMAGENET1K_V2"


def test_globs_below_an_odd_folder(tmp_path: Path) -> None:
    """What is special to globs in the spec's own folder stays literal."""
    base = tmp_path / "run [1]"
    lay_out(base)
    job = spec.loads(edit(("digits.npz", "scans/*.npz")), "job.yaml", base)
    assert job.input.source == f"{tmp_path}/run [[]1]/scans/*.npz"
    assert spec.loads(SCORE, "job.yaml", base).input.source == f"{base}/digits.npz"


def test_images_with_labels_can_be_trained_on(tmp_path: Path) -> None:
    """The folder of each image may be its label."""
    text = edit(
        ("digits.npz", "scans"),
        ("format: npz", "format: images"),
        ("fields: {x: images, id: ids, label: labels}", "fields: {id: path, label: parent}"),
        base=FINETUNE,
    )
    assert loads(text, tmp_path).input.fields.label == "parent"


def test_overrides(tmp_path: Path) -> None:
    """A later override wins; sections that are not in the file are made; values are YAML, read as in the file."""
    job = loads(
        SCORE,
        tmp_path,
        "input.batch_size=8",
        "input.batch_size=16",
        "run.retry.initial=1m",
        "run.after=[a, b]",
        "input.transform={mean: [0.5], std: [0.25]}",
        "model.args.act=on",
        "run.key='7'",
        "input.fields.id=",
        "output.path=results=1",
    )
    assert job.input.batch_size == 16
    assert job.run.retry.initial == 60.0
    assert job.run.after == ("a", "b")
    assert job.input.transform.std == (0.25,)
    assert job.model.args == {"num_classes": 10, "act": "on"}
    assert job.run.key == "7"
    assert job.input.fields.id is None
    assert job.output.path == tmp_path / "results=1"


def test_an_override_mends_the_file(tmp_path: Path) -> None:
    """A wrong value that is overridden is no problem."""
    assert loads(edit(("batch_size: 64", "batch_size: many")), tmp_path, "input.batch_size=4").input.batch_size == 4


def test_byte_order_mark_and_line_ends(tmp_path: Path) -> None:
    """A file from an editor on another system reads the same."""
    text = ("\ufeff" + SCORE.replace("\n", "\r\n")).encode()
    assert spec.loads(text, "job.yaml", tmp_path, check_files=False) == loads(SCORE, tmp_path)


@pytest.mark.parametrize(
    "text", [SCORE, FULL_SCORE, FINETUNE, FULL_TRAIN], ids=["score", "full", "train", "full-train"]
)
def test_dump_and_restore(text: str, tmp_path: Path) -> None:
    """JSON and back gives an equal spec with an equal digest, from any folder."""
    job = loads(text, tmp_path)
    stored = json.loads(json.dumps(spec.dump(job), allow_nan=False))
    assert spec.restore(stored) == job
    assert spec.digest(spec.restore(stored)) == spec.digest(job)


def test_restore_refuses_what_dump_never_wrote() -> None:
    """A damaged stored spec is one clear error."""
    with pytest.raises(SpecError, match=r"^stored spec: not a stored spec: "):
        spec.restore({"version": 1})


def test_digest_is_of_the_meaning(tmp_path: Path) -> None:
    """Comments, order and spelling do not change the digest; a value does."""
    same = edit(("run:\n  device: auto\n", ""), ("batch_size: 64", "batch_size: 0x40  # records"))
    assert spec.digest(loads(same, tmp_path)) == spec.digest(loads(SCORE, tmp_path))
    other = edit(("batch_size: 64", "batch_size: 65"))
    assert spec.digest(loads(other, tmp_path)) != spec.digest(loads(SCORE, tmp_path))


def test_specs_are_frozen(tmp_path: Path) -> None:
    """Nobody changes a spec by accident."""
    with pytest.raises(ValueError, match="frozen"):
        loads(SCORE, tmp_path).name = "other"


def test_known_outputs_are_all_accepted(tmp_path: Path) -> None:
    """Each documented output field can be asked for; names of classes need a model that has them."""
    (tmp_path / "net.py").touch()
    model = ("source: torchvision:resnet18\n  args: {num_classes: 10}", "source: python:net.py:make")
    text = edit(model, ("output:\n", f"output:\n  fields: [{', '.join(KNOWN_OUTPUTS)}]\n"))
    assert loads(text, tmp_path).output.fields == KNOWN_OUTPUTS
