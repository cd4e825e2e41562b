"""Specs with mistakes, and the exact lines that each must give: exit code 2, and nothing queued."""

# ruff: noqa: E501 - each message stands on one line, as it is printed

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SCORE = """\
version: 1
name: digits-score
kind: score
model:
  source: torchvision:resnet18
  args: {num_classes: 10}
input:
  source: digits.npz
  format: npz
  fields: {x: images, id: ids, label: labels}
  batch_size: 64
output:
  path: ../out/digits-score
run:
  device: auto
"""
FINETUNE = (
    SCORE.replace("kind: score", "kind: finetune")
    + """\
train:
  epochs: 5
"""
)


@dataclass(frozen=True, kw_only=True)
class BadSpec:
    """One spec, in a folder that `lay_out` has filled."""

    name: str
    text: str | bytes
    messages: tuple[str, ...]  # {file} stands for the spec's path, {dir} for its folder
    overrides: tuple[str, ...] = ()

    def write(self, folder: Path) -> Path:
        """Write the spec and the files that it names; return its path."""
        lay_out(folder)
        path = folder / "job.yaml"
        path.write_bytes(self.text if isinstance(self.text, bytes) else self.text.encode())
        return path

    def lines(self, path: Path) -> list[str]:
        """The messages as they read for a spec at `path`."""
        return [m.replace("{file}", str(path)).replace("{dir}", str(path.parent)) for m in self.messages]


_SENTENCE = {  # a folder of sentence-transformers
    "config.json": "{}",
    "tokenizer.json": "{}",
    "modules.json": '[{"type": "sentence_transformers.models.Transformer", "path": ""},'
    ' {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]',
    "1_Pooling/config.json": "{}",
    "config_sentence_transformers.json": '{"prompts": {"query": "query: ", "passage": "passage: "}}',
}


def lay_out(folder: Path) -> None:
    """The files that the specs below name."""
    for name in (
        *("digits.npz", "digits.csv", "notes.txt", "net.pt2", "old.pt", "scans/a.npz", "kept/checkpoint.json"),
        *("texts.jsonl", "texts.parquet", "own.py", "encoder/config.json", "encoder/tokenizer.json"),
        *("reviews.parquet", "bert/config.json", "bert/tokenizer.json"),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / "sentence" / "1_Pooling").mkdir(parents=True, exist_ok=True)
    for name, held in _SENTENCE.items():
        (folder / "sentence" / name).write_text(held)
    (folder / "link").symlink_to(folder / "scans")


def edit(*changes: tuple[str, str], base: str = SCORE) -> str:
    """`base` with each first text replaced by its second."""
    for old, new in changes:
        assert old in base, old
        base = base.replace(old, new)
    return base


BAD_SPECS = [
    BadSpec(name="empty", text="", messages=("{file}:1: the document is empty; expected a mapping of fields",)),
    BadSpec(
        name="comments only",
        text="# nothing here\n",
        messages=("{file}:1: the document is empty; expected a mapping of fields",),
    ),
    BadSpec(name="a list", text="- version: 1\n", messages=("{file}:1: found a list; expected a mapping of fields",)),
    BadSpec(name="a text", text="version 1\n", messages=("{file}:1: found 'version 1'; expected a mapping of fields",)),
    BadSpec(
        name="a tab for indentation",
        text="version: 1\nmodel:\n\tsource: torchvision:resnet18\n",
        messages=("{file}:3: found a tab; expected spaces",),
    ),
    BadSpec(
        name="an open bracket",
        text="version: 1\nname: [digits\n",
        messages=("{file}:3: not valid YAML: expected ',' or ']', but got '<stream end>'",),
    ),
    BadSpec(
        name="a control character",
        text='version: 1\nname: "a\x01b"\n',
        messages=("{file}:2: found the character '\\x01'; expected printable text",),
    ),
    BadSpec(
        name="not UTF-8", text=b"version: 1\nname: caf\xe9\n", messages=("{file}:2: not UTF-8; expected UTF-8 text",)
    ),
    BadSpec(
        name="too large",
        text="#" * ((1 << 20) + 1),
        messages=("{file}: larger than 1 MiB; expected a job spec in YAML",),
    ),
    BadSpec(
        name="nested too deeply",
        text="version: 1\nmodel:\n  args: {deep: " + "[" * 40 + "]" * 40 + "}\n",
        messages=("{file}:3: nested too deeply; expected at most 32 levels",),
    ),
    BadSpec(
        name="a second document",
        text=SCORE + "---\n" + "version: 1\n",
        messages=("{file}:16: a second document starts here; expected one document",),
    ),
    BadSpec(
        name="an alias bomb",
        text="a: &a [x, x, x, x]\nb: &b [*a, *a, *a, *a]\n",
        messages=(
            "{file}:1: a: found the anchor &a; expected no anchors or aliases",
            "{file}:1: version: missing; expected the version of this format, 1",
            "{file}:1: name: missing; expected the job's name: 1 to 100 letters, digits, dots, dashes and underscores, the first a letter or digit",
            "{file}:1: kind: missing; expected the kind of job: score or finetune",
            "{file}:1: model: missing; expected the module to run, and its weights",
            "{file}:1: input: missing; expected the records",
            "{file}:1: output: missing; expected the folder of results, and its format",
            "{file}:1: a: unknown field; expected one of version, name, kind, model, input, schedule, output, run, notify, cron, train",
            "{file}:2: b: found the anchor &b; expected no anchors or aliases",
            "{file}:2: b[0]: found the alias *a; expected the value itself",
            "{file}:2: b[1]: found the alias *a; expected the value itself",
            "{file}:2: b[2]: found the alias *a; expected the value itself",
            "{file}:2: b[3]: found the alias *a; expected the value itself",
            "{file}:2: b: unknown field; expected one of version, name, kind, model, input, schedule, output, run, notify, cron, train",
        ),
    ),
    BadSpec(
        name="an anchor",
        text=edit(("name: digits-score", "name: &name digits-score")),
        messages=("{file}:2: name: found the anchor &name; expected no anchors or aliases",),
    ),
    BadSpec(
        name="an alias",
        text=edit(("batch_size: 64", "batch_size: &size 64"), ("device: auto", "after: [*size]")),
        messages=(
            "{file}:11: input.batch_size: found the anchor &size; expected no anchors or aliases",
            "{file}:15: run.after[0]: found the alias *size; expected the value itself",
        ),
    ),
    BadSpec(
        name="a merge key",
        text=edit(("run:\n", "run:\n  <<: {priority: 1}\n")),
        messages=("{file}:15: run: found a merge key; expected the fields themselves",),
    ),
    BadSpec(
        name="equal keys",
        text=edit(("batch_size: 64", "batch_size: 64\n  batch_size: 128")),
        messages=("{file}:12: input.batch_size: given twice, first on line 11; expected one value",),
    ),
    BadSpec(
        name="a tag that constructs",
        text=edit(("{num_classes: 10}", '!!python/object/apply:os.system ["true"]')),
        messages=(
            "{file}:6: model.args: found the tag !!python/object/apply:os.system; expected a value without a tag",
        ),
    ),
    BadSpec(
        name="a tag of another type",
        text=edit(("batch_size: 64", 'batch_size: !!int "many"')),
        messages=("{file}:11: input.batch_size: found many with the tag !!int; expected a value without a tag",),
    ),
    BadSpec(
        name="a key that is a list",
        text=edit(("run:\n", "run:\n  ? [device]\n  : cpu\n")),
        messages=("{file}:15: run: found a key that is not plain text; expected a field's name",),
    ),
    BadSpec(
        name="nothing but a version",
        text="version: 1\n",
        messages=(
            "{file}:1: name: missing; expected the job's name: 1 to 100 letters, digits, dots, dashes and underscores, the first a letter or digit",
            "{file}:1: kind: missing; expected the kind of job: score or finetune",
            "{file}:1: model: missing; expected the module to run, and its weights",
            "{file}:1: input: missing; expected the records",
            "{file}:1: output: missing; expected the folder of results, and its format",
        ),
    ),
    BadSpec(
        name="another version",
        text=edit(("version: 1", "version: 2")),
        messages=("{file}:1: version: found 2; expected 1",),
    ),
    BadSpec(
        name="a version that only equals 1",
        text=edit(("version: 1", "version: true")),
        messages=("{file}:1: version: found true; expected 1",),
    ),
    BadSpec(
        name="unknown sections and fields",
        text=edit(("batch_size", "batchsize"), ("run:\n", "runs:\n")),
        messages=(
            "{file}:11: input.batchsize: unknown field, did you mean batch_size?",
            "{file}:14: runs: unknown field, did you mean run?",
        ),
    ),
    BadSpec(
        name="a field of another section",
        text=edit(("run:\n", "run:\n  batch_size: 3\n")),
        messages=("{file}:15: run.batch_size: unknown field, did you mean input.batch_size?",),
    ),
    BadSpec(
        name="a field whose name another section has, in one that has a similar one",
        text=edit(("batch_size", "shard_size")),
        messages=("{file}:11: input.shard_size: unknown field, did you mean output.shard_size?",),
    ),
    BadSpec(
        name="a field whose name only another section has",
        text=FINETUNE + "  keep: 3\n  checkpoint: {keep: 3}\n",
        messages=(
            "{file}:18: train.keep: unknown field, did you mean train.checkpoint.keep_last?",
            "{file}:19: train.checkpoint.keep: unknown field, did you mean keep_last?",
        ),
    ),
    BadSpec(
        name="an unknown field like no other",
        text=edit(("run:\n", "run:\n  colour: blue\n")),
        messages=(
            "{file}:15: run.colour: unknown field; expected one of device, gpus, max_failed_shards, priority, after, group, key, timeout, stall, error_threshold, "
            "retry",
        ),
    ),
    BadSpec(
        name="a section that is a text",
        text=edit(("run:\n  device: auto\n", "run: cuda\n")),
        messages=("{file}:14: run: found 'cuda'; expected a mapping",),
    ),
    BadSpec(
        name="a section left empty",
        text=edit(("run:\n  device: auto\n", "run:\n")),
        messages=("{file}:14: run: is empty; expected a mapping",),
    ),
    BadSpec(
        name="exponent without a dot in a whole number",
        text=edit(("batch_size: 64", "batch_size: 1e2")),
        messages=("{file}:11: input.batch_size: found 100.0; expected a whole number",),
    ),
    BadSpec(
        name="a leading zero",
        text=edit(("batch_size: 64", "batch_size: 010")),
        messages=(
            "{file}:11: input.batch_size: found 010, which has a leading zero; expected a number without it, or text in quotes",
        ),
    ),
    BadSpec(
        name="a time of day is no number",
        text=edit(("batch_size: 64", "batch_size: 12:30:00")),
        messages=("{file}:11: input.batch_size: found '12:30:00'; expected a whole number",),
    ),
    BadSpec(
        name="on is no boolean",
        text=edit(("batch_size: 64", "allow_nan: on")),
        messages=("{file}:11: input.allow_nan: found 'on'; expected true or false",),
    ),
    BadSpec(
        name="underscores make no number",
        text=edit(("batch_size: 64", "batch_size: 1_000")),
        messages=("{file}:11: input.batch_size: found '1_000'; expected a whole number",),
    ),
    BadSpec(
        name="a number beyond 64 bits",
        text=edit(("device: auto", "priority: 99999999999999999999")),
        messages=(
            "{file}:15: run.priority: found 99999999999999999999, which is too large; expected a number of 64 bits",
        ),
    ),
    BadSpec(
        name="not a number",
        text=edit(("device: auto", "error_threshold: .nan")),
        messages=("{file}:15: run.error_threshold: found .nan; expected a finite number",),
    ),
    BadSpec(
        name="a number for a text",
        text=edit(("device: auto", "key: 2026")),
        messages=("{file}:15: run.key: found 2026; expected text, in quotes",),
    ),
    BadSpec(
        name="a fraction for a whole number",
        text=edit(("batch_size: 64", "batch_size: 64.5")),
        messages=("{file}:11: input.batch_size: found 64.5; expected a whole number",),
    ),
    BadSpec(
        name="an empty batch",
        text=edit(("batch_size: 64", "batch_size: 0")),
        messages=("{file}:11: input.batch_size: found 0; expected at least 1",),
    ),
    BadSpec(
        name="a text for a list",
        text=edit(("device: auto", "after: digits-train")),
        messages=("{file}:15: run.after: found 'digits-train'; expected a list",),
    ),
    BadSpec(
        name="an unsafe name",
        text=edit(("name: digits-score", "name: ../digits")),
        messages=(
            "{file}:2: name: found '../digits'; expected 1 to 100 letters, digits, dots, dashes and underscores, the first a letter or digit",
        ),
    ),
    BadSpec(
        name="an unknown kind",
        text=edit(("kind: score", "kind: scoring")),
        messages=("{file}:3: kind: found 'scoring'; expected score or finetune",),
    ),
    BadSpec(
        name="an unknown source",
        text=edit(("torchvision:resnet18", "torchhub:resnet18")),
        messages=(
            "{file}:5: model.source: found 'torchhub:resnet18'; expected torchvision:NAME, timm:NAME, transformers:DIR, python:FILE.py:FACTORY or exported:FILE.pt2",
        ),
    ),
    BadSpec(
        name="a python source without a factory",
        text=edit(("torchvision:resnet18", "python:model.py")),
        messages=("{file}:5: model.source: found 'python:model.py'; expected python:FILE.py:FACTORY",),
    ),
    BadSpec(
        name="an exported source of another suffix",
        text=edit(("torchvision:resnet18", "exported:model.pt")),
        messages=("{file}:5: model.source: found 'exported:model.pt'; expected exported:FILE.pt2",),
    ),
    BadSpec(
        name="a python file that is missing",
        text=edit(("torchvision:resnet18", "python:net.py:make")),
        messages=("{file}:5: model.source: no file {dir}/net.py; expected an existing file",),
    ),
    BadSpec(
        name="weights of an unknown suffix",
        text=edit(("args: {num_classes: 10}", "weights: model.bin")),
        messages=(
            "{file}:6: model.weights: found 'model.bin'; expected a .safetensors, .pt or .pth file, or a weights name such as DEFAULT",
        ),
    ),
    BadSpec(
        name="weights that are missing",
        text=edit(("args: {num_classes: 10}", "weights: model.safetensors")),
        messages=(
            "{file}:6: model.weights: no file {dir}/model.safetensors; expected one that exists, or run.after with the job that will write it",
        ),
    ),
    BadSpec(
        name="weights by name for timm",
        text=edit(("torchvision:resnet18", "timm:resnet18"), ("args: {num_classes: 10}", "weights: DEFAULT")),
        messages=(
            "{file}:6: model.weights: found 'DEFAULT'; expected a .safetensors, .pt or .pth file, because model.source is not torchvision",
        ),
    ),
    BadSpec(
        name="an exported program with arguments and an unknown type",
        text=edit(("torchvision:resnet18", "exported:net.pt2"), ("args:", "dtype: fp8\n  args:")),
        messages=(
            "{file}:6: model.dtype: found 'fp8'; expected fp32, fp16 or bf16",
            "{file}:7: model.args: not allowed for an exported program; expected no args",
        ),
    ),
    BadSpec(
        name="input that is missing",
        text=edit(("digits.npz", "letters.npz")),
        messages=(
            "{file}:8: input.source: no file or folder {dir}/letters.npz; expected one that exists, or run.after with the job that will write it",
        ),
    ),
    BadSpec(
        name="a glob that matches nothing",
        text=edit(("digits.npz", "scans/*.npy"), ("npz\n  fields: {x: images, id: ids, label: labels}", "npy")),
        messages=("{file}:8: input.source: nothing matches {dir}/scans/*.npy; expected at least one file",),
    ),
    BadSpec(
        name="a format that is not the suffix",
        text=edit(("format: npz", "format: parquet")),
        messages=("{file}:8: input.source: 'digits.npz' is not parquet; expected .parquet or .pq",),
    ),
    BadSpec(
        name="a path of the home folder",
        text=edit(("../out/digits-score", "~/out")),
        messages=(
            "{file}:13: output.path: found '~/out', but ~ is not expanded; expected an absolute path, or one relative to the spec file",
        ),
    ),
    BadSpec(
        name="a URL for a path",
        text=edit(("digits.npz", "https://host/digits.npz")),
        messages=(
            "{file}:8: input.source: found the scheme https; expected a path, or an address that begins with s3, gs, az or abfs://",
        ),
    ),
    BadSpec(
        name="input with a password",
        text=edit(("digits.npz", "s3://key:secret@bucket/digits.npz")),
        messages=(
            "{file}:8: input.source: found a user or a password in the address; expected an address such as s3://BUCKET/FOLDER; credentials belong into the environment",
        ),
    ),
    BadSpec(
        name="input with a question mark",
        text=edit(("digits.npz", '"s3://bucket/digits-?.npz"')),
        messages=(
            "{file}:8: input.source: found 's3://bucket/digits-?.npz'; expected an address such as s3://BUCKET/FOLDER, without ?, #, :: and control characters",
        ),
    ),
    BadSpec(
        name="input with two slashes",
        text=edit(("digits.npz", "s3://bucket//digits.npz")),
        messages=(
            "{file}:8: input.source: found 's3://bucket//digits.npz', with a part that is empty or begins with a dot; expected names between single slashes",
        ),
    ),
    BadSpec(
        name="input by a driver that is not installed",
        text=edit(("digits.npz", "gs://bucket/digits.npz")),
        messages=(
            "{file}:8: input.source: gs:// needs the package gcsfs, which is not installed; expected pip install gcsfs",
        ),
    ),
    BadSpec(
        name="an object of another format",
        text=edit(("digits.npz", "s3://bucket/digits.csv")),
        messages=("{file}:8: input.source: 'digits.csv' is not npz; expected .npz",),
    ),
    BadSpec(
        name="only new objects",
        text=edit(("digits.npz", "s3://bucket/digits"), ("  format: npz", "  format: npz\n  only_new: true")),
        messages=(
            "{file}:8: input.source: found an address, but input.only_new compares local files; expected a local folder, or no only_new",
        ),
    ),
    BadSpec(
        name="an output among the objects that are read",
        text=edit(("digits.npz", "s3://bucket/digits/*.npz"), ("../out/digits-score", "s3://bucket/digits/out")),
        messages=("{file}:13: output.path: lies inside input.source; expected a folder of its own",),
    ),
    BadSpec(
        name="a path with a control character",
        text=edit(("digits.npz", '"digits\\n.npz"')),
        messages=("{file}:8: input.source: found 'digits\\n.npz', which holds control characters; expected a path",),
    ),
    BadSpec(
        name="output over the root folder",
        text=edit(("../out/digits-score", "/")),
        messages=("{file}:13: output.path: is the root folder; expected a folder of its own",),
    ),
    BadSpec(
        name="output over the folder of the spec",
        text=edit(("../out/digits-score", "..")),
        messages=("{file}:13: output.path: contains the spec's folder; expected a folder of its own",),
    ),
    BadSpec(
        name="output over the input",
        text=edit(("digits.npz", "scans"), ("../out/digits-score", "scans/scores")),
        messages=("{file}:13: output.path: lies inside input.source; expected a folder of its own",),
    ),
    BadSpec(
        name="output that holds the input",
        text=edit(("digits.npz", "scans/a.npz"), ("../out/digits-score", "scans")),
        messages=("{file}:13: output.path: contains input.source; expected a folder of its own",),
    ),
    BadSpec(
        name="output that is a file",
        text=edit(("../out/digits-score", "notes.txt")),
        messages=("{file}:13: output.path: exists and is not a folder; expected a folder",),
    ),
    BadSpec(
        name="output inside a file",
        text=edit(("../out/digits-score", "notes.txt/scores")),
        messages=("{file}:13: output.path: {dir}/notes.txt is not a folder; expected a folder",),
    ),
    BadSpec(
        name="output that is a link",
        text=edit(("../out/digits-score", "link")),
        messages=("{file}:13: output.path: is a symbolic link; expected a folder",),
    ),
    BadSpec(
        name="output with an unknown scheme",
        text=edit(("../out/digits-score", "ftp://host/out")),
        messages=(
            "{file}:13: output.path: found the scheme ftp; expected a path, or an address that begins with s3, gs, az or abfs://",
        ),
    ),
    BadSpec(
        name="output that is a whole bucket",
        text=edit(("../out/digits-score", "s3://bucket")),
        messages=(
            "{file}:13: output.path: found 's3://bucket', which names a whole bucket; expected a folder in it: s3://bucket/FOLDER",
        ),
    ),
    BadSpec(
        name="output with a password",
        text=edit(("../out/digits-score", "s3://key:secret@bucket/out")),
        messages=(
            "{file}:13: output.path: found a user or a password in the address; expected an address such as s3://BUCKET/FOLDER; credentials belong into the environment",
        ),
    ),
    BadSpec(
        name="output by a driver that is not installed",
        text=edit(("../out/digits-score", "gs://bucket/out")),
        messages=(
            "{file}:13: output.path: gs:// needs the package gcsfs, which is not installed; expected pip install gcsfs",
        ),
    ),
    BadSpec(
        name="only new, into an object store",
        text=edit(("../out/digits-score", "s3://bucket/out"), ("  format: npz", "  format: npz\n  only_new: true")),
        messages=(
            "{file}:14: output.path: found an address, but input.only_new keeps its list of files beside the output; expected a local folder, or no only_new",
        ),
    ),
    BadSpec(
        name="output fields",
        text=edit(("output:\n", "output:\n  fields: [id, top1, id, top-5]\n"), (", label: labels", "")),
        messages=(
            "{file}:13: output.fields[3]: found 'top-5'; expected id, label, top1, top1_label, top5, probability, probabilities, score, logits, embedding, token_count, tokens, offsets, token_labels, token_probabilities, or the name of one of the model's outputs",
        ),
    ),
    BadSpec(
        name="labels that are not there",
        text=edit(("output:\n", "output:\n  fields:\n  - id\n  - label\n"), (", label: labels", "")),
        messages=("{file}:15: output.fields[1]: label needs input.fields.label, which is not given",),
    ),
    BadSpec(
        name="no output fields",
        text=edit(("output:\n", "output:\n  fields: []\n")),
        messages=("{file}:13: output.fields: found an empty list; expected at least one item",),
    ),
    BadSpec(
        name="an unknown policy",
        text=edit(("output:\n", "output:\n  if_exists: overwrite\n")),
        messages=("{file}:13: output.if_exists: found 'overwrite'; expected fail, resume or replace",),
    ),
    BadSpec(
        name="mean without std",
        text=edit(("  batch_size: 64", "  transform: {resize: 32, mean: [0.5]}")),
        messages=("{file}:11: input.transform.std: missing; expected one number for each number in mean",),
    ),
    BadSpec(
        name="std of another length, and not positive",
        text=edit(("  batch_size: 64", "  transform:\n    mean: [0.5, 0.5]\n    std: [0.5, 0.5, 0.5]\n    scale: -1")),
        messages=(
            "{file}:13: input.transform.std: found 3 numbers; expected 2, as in mean",
            "{file}:14: input.transform.scale: found -1; expected more than 0",
        ),
    ),
    BadSpec(
        name="a standard deviation of zero",
        text=edit(("  batch_size: 64", "  transform:\n    mean: [0.5, 0.5]\n    std: [0.5, 0]")),
        messages=("{file}:13: input.transform.std[1]: found 0; expected more than 0",),
    ),
    BadSpec(
        name="mean and std for other channels",
        text=edit(
            ("  batch_size: 64", "  transform:\n    channels: 1\n    mean: [0.5, 0.5, 0.5]\n    std: [0.5, 0.5, 0.5]")
        ),
        messages=(
            "{file}:13: input.transform.mean: found 3 numbers; expected 1",
            "{file}:14: input.transform.std: found 3 numbers; expected 1",
        ),
    ),
    BadSpec(
        name="a crop larger than the image",
        text=edit(("  batch_size: 64", "  transform: {resize: [32, 48], center_crop: 40}")),
        messages=("{file}:11: input.transform.center_crop: larger than resize; expected at most its size",),
    ),
    BadSpec(
        name="a shorter edge and a size",
        text=edit(("  batch_size: 64", "  transform: {resize: 32, shortest_edge: 40, center_crop: 32}")),
        messages=("{file}:11: input.transform.shortest_edge: resize is given, too; expected one of the two",),
    ),
    BadSpec(
        name="a shorter edge without a crop",
        text=edit(("  batch_size: 64", "  transform: {shortest_edge: 40}")),
        messages=(
            "{file}:11: input.transform.center_crop: missing, so the size of a picture would depend on its shape; expected the size that all pictures get",
        ),
    ),
    BadSpec(
        name="a crop larger than the shorter edge",
        text=edit(
            ("  batch_size: 64", "  transform: {shortest_edge: 40, center_crop: [32, 41], interpolation: lanczos}")
        ),
        messages=(
            "{file}:11: input.transform.interpolation: found 'lanczos'; expected bilinear or bicubic",
            "{file}:11: input.transform.center_crop: larger than shortest_edge; expected at most its size",
        ),
    ),
    BadSpec(
        name="a size of three numbers",
        text=edit(("  batch_size: 64", "  transform: {resize: [32, 32, 3]}")),
        messages=(
            "{file}:11: input.transform.resize: found a list; expected a size in pixels from 1 to 65536, or [height, width]",
        ),
    ),
    BadSpec(
        name="a size beyond the limit",
        text=edit(("  batch_size: 64", "  transform: {resize: 100000}")),
        messages=(
            "{file}:11: input.transform.resize: found 100000; expected a size in pixels from 1 to 65536, or [height, width]",
        ),
    ),
    BadSpec(
        name="columns of images",
        text=edit(("digits.npz", "scans"), ("format: npz", "format: images")),
        messages=(
            "{file}:10: input.fields.x: found 'images', but input.format is images; expected none",
            "{file}:10: input.fields.id: found 'ids', but input.format is images; expected path, or none",
            "{file}:10: input.fields.label: found 'labels', but input.format is images; expected parent, or none",
        ),
    ),
    BadSpec(
        name="one array for records and labels",
        text=edit(("label: labels", "label: images")),
        messages=("{file}:10: input.fields.label: 'images' is given twice; expected different arrays or columns",),
    ),
    BadSpec(
        name="an unknown device",
        text=edit(("device: auto", "device: gpu:0")),
        messages=("{file}:15: run.device: found 'gpu:0'; expected auto, cpu, cuda or cuda:N",),
    ),
    BadSpec(
        name="a share above one",
        text=edit(("device: auto", "error_threshold: 1.5")),
        messages=("{file}:15: run.error_threshold: found 1.5; expected a fraction from 0 to 1, or -1 to tolerate all",),
    ),
    BadSpec(
        name="a wait that is no duration",
        text=edit(("device: auto", "timeout: 2 hours")),
        messages=(
            "{file}:15: run.timeout: found '2 hours'; expected seconds or a duration such as 90, 5s, 10m, 2h or 1h30m",
        ),
    ),
    BadSpec(
        name="no time at all",
        text=edit(("device: auto", "timeout: 0")),
        messages=("{file}:15: run.timeout: found 0; expected more than 0",),
    ),
    BadSpec(
        name="no time without progress",
        text=edit(("device: auto", "stall: 0")),
        messages=("{file}:15: run.stall: found 0; expected more than 0, or off",),
    ),
    BadSpec(
        name="a stall that is no duration",
        text=edit(("device: auto", "stall: never")),
        messages=(
            "{file}:15: run.stall: found 'never'; expected off, seconds or a duration such as 90, 5s, 10m, 2h or 1h30m",
        ),
    ),
    BadSpec(
        name="a longest wait below the first",
        text=edit(("device: auto", "retry: {initial: 10m, max: 5s}")),
        messages=("{file}:15: run.retry.max: less than run.retry.initial; expected at least as long",),
    ),
    BadSpec(
        name="after itself and twice after another",
        text=edit(("device: auto", "after: [digits-score, a, a]")),
        messages=(
            "{file}:15: run.after[0]: names the job itself; expected other jobs",
            "{file}:15: run.after[2]: a is given twice; expected each job once",
        ),
    ),
    BadSpec(
        name="after a job, twice, with different ends",
        text=edit(("device: auto", "after: [a, {job: a, when: failure}]")),
        messages=("{file}:15: run.after[1]: a is given twice; expected each job once",),
    ),
    BadSpec(
        name="after an end that there is not",
        text=edit(("device: auto", "after: [{job: a, when: failed}]")),
        messages=("{file}:15: run.after[0]: when: found 'failed'; expected success, failure or done",),
    ),
    BadSpec(
        name="after nobody",
        text=edit(("device: auto", "after: [{when: done}]")),
        messages=(
            "{file}:15: run.after[0]: found {when}; expected a job's id or name, or {job: NAME, when: success | failure | done}",
        ),
    ),
    BadSpec(
        name="after a number",
        text=edit(("device: auto", "after: [7]")),
        messages=(
            "{file}:15: run.after[0]: found 7; expected a job's id or name, or {job: NAME, when: success | failure | done}",
        ),
    ),
    BadSpec(
        name="after a job with an unknown field",
        text=edit(("device: auto", "after: [{job: a, then: done}]")),
        messages=(
            "{file}:15: run.after[0]: found {job, then}; expected a job's id or name, or {job: NAME, when: success | failure | done}",
        ),
    ),
    BadSpec(
        name="after a job whose name is none",
        text=edit(("device: auto", "after: [{job: a b, when: done}]")),
        messages=(
            "{file}:15: run.after[0]: found 'a b'; expected 1 to 100 letters, digits, dots, dashes and underscores, the first a letter or digit",
        ),
    ),
    BadSpec(
        name="a group without a limit",
        text=edit(("device: auto", "group: {name: gpu}")),
        messages=(
            "{file}:15: run.group.limit: missing; expected the number of the group's jobs that may run at once; the newest job's value counts",
        ),
    ),
    BadSpec(
        name="a group by its name alone",
        text=edit(("device: auto", "group: gpu")),
        messages=("{file}:15: run.group: found 'gpu'; expected a mapping",),
    ),
    BadSpec(
        name="a group in which nothing may run",
        text=edit(("device: auto", "group: {name: gpu, limit: 0}")),
        messages=("{file}:15: run.group.limit: found 0; expected at least 1",),
    ),
    BadSpec(
        name="a group whose name is none",
        text=edit(("device: auto", "group: {name: a/b, limit: 1}")),
        messages=(
            "{file}:15: run.group.name: found 'a/b'; expected 1 to 100 letters, digits, dots, dashes and underscores, the first a letter or digit",
        ),
    ),
    BadSpec(
        name="a job name that is none",
        text=edit(("device: auto", 'after: ["a b"]')),
        messages=(
            "{file}:15: run.after[0]: found 'a b'; expected 1 to 100 letters, digits, dots, dashes and underscores, the first a letter or digit",
        ),
    ),
    BadSpec(
        name="wrong types in schedule",
        text=SCORE + "schedule:\n  streams: many\n  fuse: 3\n",
        messages=(
            "{file}:17: schedule.streams: found 'many'; expected auto or a whole number from 1 to 1024",
            "{file}:18: schedule.fuse: found 3; expected auto, off or max",
        ),
    ),
    BadSpec(
        name="an unknown kernel",
        text=SCORE + "schedule:\n  kernels:\n    atention: false\n",
        messages=("{file}:18: schedule.kernels.atention: unknown field, did you mean attention?",),
    ),
    BadSpec(
        name="kernels named otherwise",
        text=SCORE + "schedule:\n  kernels: {Split_K: false}\n  depthwise_activation: false\n",
        messages=(
            "{file}:17: schedule.kernels.Split_K: unknown field, did you mean split-k?",
            "{file}:18: schedule.depthwise_activation: unknown field, "
            "did you mean schedule.kernels.depthwise-activation?",
        ),
    ),
    BadSpec(
        name="a kernel like no other",
        text=SCORE + "schedule:\n  kernels: {zzz: false}\n",
        messages=(
            "{file}:17: schedule.kernels.zzz: unknown field; expected one of attention, depthwise, "
            "depthwise-activation, pointwise, separable, squeeze-excite, linear-gelu, patches, split-k, fused-convolution, crowded, product, packed-weights, "
            "merged, folded",
        ),
    ),
    BadSpec(
        name="kernels that are neither on nor off",
        text=SCORE + "schedule:\n  kernels: {attention: off, patches: 0, folded: }\n",
        messages=(
            "{file}:17: schedule.kernels.attention: found 'off'; expected true or false",
            "{file}:17: schedule.kernels.patches: found 0; expected true or false",
            "{file}:17: schedule.kernels.folded: is empty; expected true or false",
        ),
    ),
    BadSpec(
        name="a list of kernels",
        text=SCORE + "schedule:\n  kernels: [attention]\n",
        messages=("{file}:17: schedule.kernels: found a list; expected a mapping",),
    ),
    BadSpec(
        name="a budget that is no duration",
        text=SCORE + "schedule: {budget: 2 minutes}\n",
        messages=(
            "{file}:16: schedule.budget: found '2 minutes'; expected seconds or a duration such as 90, 5s, 10m, 2h or 1h30m",
        ),
    ),
    BadSpec(
        name="a budget below zero",
        text=SCORE + "schedule:\n  budget: -1\n",
        messages=("{file}:17: schedule.budget: found -1; expected a duration between 0 and 3650d",),
    ),
    BadSpec(
        name="no time to build in",
        text=SCORE + "schedule:\n  budget: 0s\n",
        messages=("{file}:17: schedule.budget: found 0; expected more than 0",),
    ),
    BadSpec(
        name="score with train",
        text=SCORE + "train: {epochs: 5}\n",
        messages=("{file}:16: train: not allowed if kind is score; expected kind: finetune, or no train",),
    ),
    BadSpec(
        name="finetune without train",
        text=edit(("kind: score", "kind: finetune")),
        messages=("{file}:3: train: missing; expected a mapping, because kind is finetune",),
    ),
    BadSpec(
        name="finetune without labels",
        text=edit((", label: labels", ""), base=FINETUNE),
        messages=(
            "{file}:10: input.fields.label: missing; expected the array or column of labels, because kind is finetune",
        ),
    ),
    BadSpec(
        name="finetune with replays in flight",
        text=edit(("train:\n", "schedule:\n  on_miss: fail\n  in_flight: 4\ntrain:\n"), base=FINETUNE),
        messages=(
            "{file}:18: schedule.in_flight: more than 1; expected auto or 1, because each training step needs the one before it",
        ),
    ),
    BadSpec(
        name="progressive finetune",
        text=edit(("train:\n", "schedule:\n  progressive: true\ntrain:\n"), base=FINETUNE),
        messages=("{file}:17: schedule.progressive: not supported yet; expected auto or false if kind is finetune",),
    ),
    BadSpec(
        name="progressive without a build",
        text=edit(("output:\n", "schedule:\n  on_miss: eager\n  progressive: true\noutput:\n")),
        messages=(
            "{file}:14: schedule.progressive: found true, but schedule.on_miss is eager; "
            "expected auto, false, or on_miss: build",
        ),
    ),
    BadSpec(
        name="finetune with columns to write",
        text=edit(("output:\n", "output:\n  format: jsonl\n  fields: [id]\n"), base=FINETUNE),
        messages=(
            "{file}:13: output.format: not allowed if kind is finetune; expected kind: score, or no format",
            "{file}:14: output.fields: not allowed if kind is finetune; expected kind: score, or no fields",
        ),
    ),
    BadSpec(
        name="finetune of an exported program",
        text=edit(("torchvision:resnet18", "exported:net.pt2"), ("  args: {num_classes: 10}\n", ""), base=FINETUNE),
        messages=("{file}:5: model.source: an exported program cannot be trained; expected another source",),
    ),
    BadSpec(
        name="finetune from two weights",
        text=edit(
            ("args: {num_classes: 10}", "weights: DEFAULT"), ("  epochs: 5", "  init_from: old.pt"), base=FINETUNE
        ),
        messages=("{file}:17: train.init_from: not allowed together with model.weights; expected one of them",),
    ),
    BadSpec(
        name="momentum for adam",
        text=FINETUNE + "  optimizer:\n    name: adam\n    momentum: 0.9\n    lr: 0\n",
        messages=(
            "{file}:20: train.optimizer.momentum: not allowed if the optimizer is adam; expected sgd, or no momentum",
            "{file}:21: train.optimizer.lr: found 0; expected more than 0",
        ),
    ),
    BadSpec(
        name="validation too rarely, of what is not there",
        text=FINETUNE + "  validation:\n    source: digits-val.npz\n    every_epochs: 6\n",
        messages=(
            "{file}:19: train.validation.source: no file or folder {dir}/digits-val.npz; expected one that exists, or run.after with the job that will write it",
            "{file}:20: train.validation.every_epochs: more than train.epochs; expected at most 5",
        ),
    ),
    BadSpec(
        name="resume from weights",
        text=FINETUNE + "  resume: old.pt\n",
        messages=(
            "{file}:18: train.resume: found the weights file {dir}/old.pt; expected the folder of a checkpoint, or train.init_from to start a new training from these weights",
        ),
    ),
    BadSpec(
        name="init from a checkpoint",
        text=FINETUNE + "  init_from: kept\n",
        messages=(
            "{file}:18: train.init_from: found the checkpoint 'kept'; expected train.resume to continue its training, or its model.safetensors to start a new one",
        ),
    ),
    BadSpec(
        name="resume and init at once",
        text=FINETUNE + "  resume: kept\n  init_from: old.pt\n",
        messages=(
            "{file}:18: train.resume: names a checkpoint, but train.init_from is given too; expected resume, to continue a training, or init_from, to start a new one",
        ),
    ),
    BadSpec(
        name="resume from what is no checkpoint",
        text=FINETUNE + "  resume: scans\n",
        messages=(
            "{file}:18: train.resume: no file {dir}/scans/checkpoint.json; expected a folder with a checkpoint.json, auto or never",
        ),
    ),
    BadSpec(
        name="an output over the checkpoint",
        text=edit(("../out/digits-score", "kept"), base=FINETUNE) + "  resume: kept\n",
        messages=("{file}:13: output.path: is train.resume; expected a folder of its own",),
    ),
    BadSpec(
        name="a batch of one",
        text=edit(("batch_size: 64", "batch_size: 1"), base=FINETUNE),
        messages=(
            "{file}:11: input.batch_size: found 1, but kind is finetune; expected 2 or more, because batch statistics need two records",
        ),
    ),
    BadSpec(
        name="moments for sgd, and decay for no one",
        text=FINETUNE + "  optimizer:\n    betas: [0.9, 0.99]\n    eps: 1e-6\n    no_decay_on_norms: true\n",
        messages=(
            "{file}:19: train.optimizer.betas: not allowed if the optimizer is sgd; expected adam or adamw, or no betas",
            "{file}:20: train.optimizer.eps: not allowed if the optimizer is sgd; expected adam or adamw, or no eps",
            "{file}:21: train.optimizer.no_decay_on_norms: true without weight_decay; expected weight_decay above 0",
        ),
    ),
    BadSpec(
        name="betas that are none",
        text=FINETUNE + "  optimizer: {name: adam, betas: [0.9, 1]}\n",
        messages=("{file}:18: train.optimizer.betas: found a list; expected two numbers, at least 0 and below 1",),
    ),
    BadSpec(
        name="one beta",
        text=FINETUNE + "  optimizer: {name: adam, betas: 0.9}\n",
        messages=("{file}:18: train.optimizer.betas: found 0.9; expected two numbers, at least 0 and below 1",),
    ),
    BadSpec(
        name="a warm-up before one cycle",
        text=FINETUNE + "  lr_schedule: {name: one_cycle, warmup_steps: 5}\n",
        messages=(
            "{file}:18: train.lr_schedule.warmup_steps: not allowed for one_cycle, which has its own warm-up; expected another schedule, or no warmup_steps",
        ),
    ),
    BadSpec(
        name="an unknown loss",
        text=FINETUNE + "  loss: hinge\n",
        messages=("{file}:18: train.loss: found 'hinge'; expected cross_entropy, mse, bce or python:FILE.py:FUNCTION",),
    ),
    BadSpec(
        name="a loss of the user's without a function",
        text=FINETUNE + "  loss: python:loss.py\n",
        messages=(
            "{file}:18: train.loss: found 'python:loss.py'; expected cross_entropy, mse, bce or python:FILE.py:FUNCTION",
        ),
    ),
    BadSpec(
        name="a loss of the user's that is not there",
        text=FINETUNE + "  loss: python:loss.py:fn\n",
        messages=("{file}:18: train.loss: no file {dir}/loss.py; expected an existing file",),
    ),
    BadSpec(
        name="numbers from the folders of images, smoothed",
        text=edit(
            ("format: npz", "format: images"), ("{x: images, id: ids, label: labels}", "{label: parent}"), base=FINETUNE
        ).replace("digits.npz", "scans")
        + "  loss: bce\n  label_smoothing: 0.1\n",
        messages=(
            "{file}:18: train.loss: bce needs numbers, but the labels of images are folder names; expected cross_entropy, or another input.format",
            "{file}:19: train.label_smoothing: not allowed if the loss is bce; expected cross_entropy, or no label_smoothing",
        ),
    ),
    BadSpec(
        name="measures without a validation",
        text=FINETUNE + "  checkpoint: {best: val_accuracy}\n  early_stopping: {patience: 2}\n",
        messages=(
            "{file}:18: train.checkpoint.best: val_accuracy needs validation data; expected train.validation, or another metric",
            "{file}:19: train.early_stopping.metric: val_loss needs validation data; expected train.validation, or another metric",
        ),
    ),
    BadSpec(
        name="the accuracy of numbers",
        text=FINETUNE + "  loss: mse\n  checkpoint: {best: accuracy}\n",
        messages=("{file}:19: train.checkpoint.best: mse has no accuracy; expected loss",),
    ),
    BadSpec(
        name="an unknown measure",
        text=FINETUNE + "  checkpoint: {best: f1}\n",
        messages=(
            "{file}:18: train.checkpoint.best: found 'f1'; expected loss, accuracy, val_loss, val_accuracy or val_f1",
        ),
    ),
    BadSpec(
        name="patience that never ends",
        text=FINETUNE
        + "  early_stopping: {patience: 3}\n  validation: {source: digits.npz, every_epochs: 2}\n"
        + "  checkpoint: {every_epochs: 6}\n",
        messages=(
            "{file}:18: train.early_stopping.patience: val_loss is measured only 2 times, so it never ends the training; expected less than 2",
            "{file}:20: train.checkpoint.every_epochs: more than train.epochs; expected at most 5",
        ),
    ),
    BadSpec(
        name="early stopping without patience",
        text=FINETUNE + "  early_stopping: {metric: loss}\n",
        messages=(
            "{file}:18: train.early_stopping.patience: missing; expected the number of measurements in a row without improvement after which the training ends",
        ),
    ),
    BadSpec(
        name="wrong measures, of which nothing follows",
        text=edit(("epochs: 5", "epochs: 2"), base=FINETUNE)
        + "  early_stopping: {metric: f1, min_delta: -1}\n  checkpoint: {best: f1}\n  validation: {every_epochs: 0}\n",
        messages=(
            "{file}:18: train.early_stopping.metric: found 'f1'; expected loss, accuracy, val_loss, val_accuracy or val_f1",
            "{file}:18: train.early_stopping.patience: missing; expected the number of measurements in a row without improvement after which the training ends",
            "{file}:18: train.early_stopping.min_delta: found -1; expected at least 0",
            "{file}:19: train.checkpoint.best: found 'f1'; expected loss, accuracy, val_loss, val_accuracy or val_f1",
            "{file}:20: train.validation.source: missing; expected a file, a folder or a glob",
            "{file}:20: train.validation.every_epochs: found 0; expected at least 1",
        ),
    ),
    BadSpec(
        name="a glob twice",
        text=FINETUNE + "  freeze:\n  - conv*\n  - conv*\n",
        messages=("{file}:20: train.freeze[1]: conv* is given twice; expected each glob once",),
    ),
    BadSpec(
        name="numbers out of range in a training",
        text=FINETUNE
        + "  clip_norm: 0\n  accumulate: 0\n  label_smoothing: 1\n  last_batch: pad\n"
        + "  augment: {crop_padding: -1, flip: sideways}\n",
        messages=(
            "{file}:18: train.clip_norm: found 0; expected more than 0",
            "{file}:19: train.accumulate: found 0; expected at least 1",
            "{file}:20: train.label_smoothing: found 1; expected less than 1",
            "{file}:21: train.last_batch: found 'pad'; expected keep or drop",
            "{file}:22: train.augment.crop_padding: found -1; expected at least 0",
            "{file}:22: train.augment.flip: found 'sideways'; expected horizontal, vertical or both",
        ),
    ),
    BadSpec(
        name="random parts of pictures, with ranges that are none",
        text=FINETUNE + "  augment:\n    random_resized_crop: {scale: [1.0, 0.5], ratio: 2, size: 8}\n",
        messages=(
            "{file}:19: train.augment.random_resized_crop.scale: found [1.0, 0.5]; expected [smallest, largest], two fractions above 0 and up to 1",
            "{file}:19: train.augment.random_resized_crop.ratio: found 2; expected [smallest, largest], width over height, above 0 and up to 100",
            "{file}:19: train.augment.random_resized_crop.size: unknown field; expected one of scale, ratio",
        ),
    ),
    BadSpec(
        name="random parts of what holds no pictures, which are also padded",
        text=edit(("source: digits.npz", "source: digits.csv"), ("format: npz", "format: csv"), base=FINETUNE)
        + "  augment: {random_resized_crop: true, crop_padding: 4}\n",
        messages=(
            "{file}:18: train.augment.crop_padding: not allowed together with random_resized_crop; expected random_resized_crop or crop_padding",
            "{file}:18: train.augment.random_resized_crop: not allowed for csv, which holds no images; expected another input.format, or no random_resized_crop",
        ),
    ),
    BadSpec(
        name="many problems, by line",
        text=edit(
            ("version: 1", "version: 3"),
            ("kind: score", "kind: scores"),
            ("batch_size: 64", "batch_size: -1"),
            ("device: auto", "device: tpu"),
        ),
        messages=(
            "{file}:1: version: found 3; expected 1",
            "{file}:3: kind: found 'scores'; expected score or finetune",
            "{file}:11: input.batch_size: found -1; expected at least 1",
            "{file}:15: run.device: found 'tpu'; expected auto, cpu, cuda or cuda:N",
        ),
    ),
    BadSpec(
        name="an override of the wrong type",
        text=SCORE,
        messages=("override input.batch_size=abc: input.batch_size: found 'abc'; expected a whole number",),
        overrides=("input.batch_size=abc",),
    ),
    BadSpec(
        name="an override of an unknown field",
        text=SCORE,
        messages=("override input.batchsize=8: input.batchsize: unknown field, did you mean batch_size?",),
        overrides=("input.batchsize=8",),
    ),
    BadSpec(
        name="overrides that are none",
        text=SCORE,
        messages=(
            "override input.batch_size: not an assignment; expected KEY=VALUE with a dotted key such as input.batch_size=8",
            "override =3: not an assignment; expected KEY=VALUE with a dotted key such as input.batch_size=8",
            "override run..key=a: not an assignment; expected KEY=VALUE with a dotted key such as input.batch_size=8",
        ),
        overrides=(
            "input.batch_size",
            "=3",
            "run..key=a",
        ),
    ),
    BadSpec(
        name="an override that is not YAML",
        text=SCORE,
        messages=("override run.after=[a: run.after: not valid YAML: expected ',' or ']', but got '<stream end>'",),
        overrides=("run.after=[a",),
    ),
    BadSpec(
        name="an override with a leading zero",
        text=SCORE,
        messages=(
            "override model.args.num_classes=010: model.args.num_classes: found 010, which has a leading zero; expected a number without it, or text in quotes",
        ),
        overrides=("model.args.num_classes=010",),
    ),
    BadSpec(
        name="an override below a number",
        text=SCORE,
        messages=("override name.first=a: name: found 'digits-score'; expected a mapping",),
        overrides=("name.first=a",),
    ),
    BadSpec(
        name="file and override together",
        text=edit(("kind: score", "kind: scores")),
        messages=(
            "{file}:3: kind: found 'scores'; expected score or finetune",
            "override name=a b: name: found 'a b'; expected 1 to 100 letters, digits, dots, dashes and underscores, the first a letter or digit",
            "override run.device=tpu: run.device: found 'tpu'; expected auto, cpu, cuda or cuda:N",
        ),
        overrides=(
            "run.device=tpu",
            "name=a b",
        ),
    ),
    BadSpec(
        name="only new, with three mistakes",
        text=edit(("  format: npz", "  format: npz\n  only_new: {settle: soon, changed: rescan, modelchange: all}")),
        messages=(
            "{file}:10: input.only_new.settle: found 'soon'; expected seconds or a duration such as 90, 5s, 10m, 2h or 1h30m",
            "{file}:10: input.only_new.changed: found 'rescan'; expected rescore, ignore or fail",
            "{file}:10: input.only_new.modelchange: unknown field, did you mean model_change?",
        ),
    ),
    BadSpec(
        name="only new is no mapping",
        text=edit(("  format: npz", "  format: npz\n  only_new: 1m")),
        messages=("{file}:10: input.only_new: found '1m'; expected a mapping",),
    ),
    BadSpec(
        name="only new, of a training",
        text=edit(("  format: npz", "  format: npz\n  only_new: true"), base=FINETUNE),
        messages=(
            "{file}:10: input.only_new: not allowed if kind is finetune, which reads all records in every epoch; expected no only_new",
        ),
    ),
    BadSpec(
        name="a decoder for arrays",
        text=edit(("  format: npz", "  format: npz\n  decode: gpu")),
        messages=(
            "{file}:10: input.decode: found gpu, but input.format is npz, which holds no pictures; expected no decode",
        ),
    ),
    BadSpec(
        name="a device's decoder on a CPU",
        text=edit(
            ("  source: digits.npz", "  source: ."),
            ("  format: npz", "  format: images\n  decode: gpu"),
            ("  fields: {x: images, id: ids, label: labels}", "  fields: {}"),
            ("  device: auto", "  device: cpu"),
        ),
        messages=("{file}:10: input.decode: found gpu, but run.device is cpu; expected cpu or auto",),
    ),
    BadSpec(
        name="an unknown decoder",
        text=edit(("  format: npz", "  format: npz\n  decode: pillow")),
        messages=("{file}:10: input.decode: found 'pillow'; expected auto, cpu or gpu",),
    ),
    BadSpec(
        name="only new, in the place of what was published",
        text=edit(
            ("  format: npz", "  format: npz\n  only_new: true"),
            ("  path: ../out/digits-score", "  path: ../out/digits-score\n  if_exists: replace"),
        ),
        messages=(
            "{file}:15: output.if_exists: found replace, but with input.only_new it would remove the output of earlier runs; expected fail, and a different output.path for each run",
        ),
    ),
    BadSpec(
        name="only new, resumed",
        text=edit(
            ("  format: npz", "  format: npz\n  only_new: {changed: fail}"),
            ("  path: ../out/digits-score", "  path: ../out/digits-score\n  if_exists: resume"),
        ),
        messages=(
            "{file}:15: output.if_exists: found resume, but with input.only_new no two runs score the same files; expected fail",
        ),
    ),
    BadSpec(
        name="only new, from a folder that is missing",
        text=edit(("source: digits.npz", "source: inbox/*.npz"), ("  format: npz", "  format: npz\n  only_new: true")),
        messages=(
            "{file}:8: input.source: no file or folder {dir}/inbox; expected one that exists, or run.after with the job that will write it",
        ),
    ),
    BadSpec(
        name="notify: an event that is none, twice the same, and words for a variable",
        text=SCORE
        + "notify: {on: [failed, failed, started], webhook: 'https://x.example.org/$A', command: [tell, '${A}']}\n",
        messages=(
            "{file}:16: notify.on[2]: found 'started'; expected failed, quarantined, missed, recovered or succeeded",
            "{file}:16: notify.webhook: found a $ without a variable's name; expected ${NAME}, or %24 for the character itself",
            "{file}:16: notify.command: found '${A}'; expected words without variables: the command gets the environment of the worker",
        ),
    ),
    BadSpec(
        name="notify: an event twice",
        text=SCORE + "notify:\n  on: [failed, recovered, failed]\n",
        messages=("{file}:17: notify.on[2]: failed is given twice; expected each event once",),
    ),
    BadSpec(
        name="notify: a ping with a password",
        text=SCORE + "notify: {ping: 'https://me:secret@hc-ping.com/x'}\n",
        messages=(
            "{file}:16: notify.ping: found an address with a user name or password; expected none, or a variable such as ${HOOK_URL}",
        ),
    ),
    BadSpec(
        name="notify: a list of hosts, which is the configuration's",
        text=SCORE + "notify: {on: [failed], hosts: [x.example.org]}\n",
        messages=("{file}:16: notify.hosts: unknown field; expected one of on, webhook, command, ping",),
    ),
    BadSpec(
        name="notify: an address by itself",
        text=SCORE + "notify: https://x.example.org/\n",
        messages=("{file}:16: notify: found 'https://x.example.org/'; expected a mapping",),
    ),
]
