"""A picture and a plain text in each record: the text becomes tokens beside the picture, and a CLIP scores both."""

from __future__ import annotations

import csv
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from nimble_jobs.data import Reader, open_reader
from nimble_jobs.errors import DataError, ModelError, SpecError
from nimble_jobs.job import JobState
from nimble_jobs.models import from_transformers
from nimble_jobs.models.build import build
from nimble_jobs.spec import dump, load, restore
from nimble_jobs.spec.model import FieldsSpec, InputSpec
from nimble_jobs.store import open_store
from nimble_jobs.store.home import resolve
from nimble_jobs.workloads.look import look
from nimble_jobs.workloads.text.setup import ColumnOfText
from tests.text_jobs import run
from tests.text_models import TEXTS, WORDS, rewrite, write_clip, write_tokenizer

pytest.importorskip("transformers")

SPEC = """\
version: 1
name: pairs
kind: score
model: {{source: "transformers:{folder}/clip"}}
input:
  source: {folder}/pairs.parquet
  format: parquet
  fields: {{x: {{{arguments}}}, id: name}}
  batch_size: 3
  text: {text}
run: {{device: cpu, error_threshold: {threshold}}}
output: {{path: {folder}/out, fields: [id, image_embeds, text_embeds, logits_per_image]}}
"""
ARGUMENTS = "pixel_values: picture, input_ids: caption"


def clip(folder: Path) -> Path:
    """Its tokenizer ends texts with the token that the model looks for: [SEP]."""
    found = write_clip(folder / "clip")
    write_tokenizer(found, longest=16)
    config = json.loads((found / "config.json").read_text())
    rewrite(found / "config.json", text_config={**config["text_config"], "eos_token_id": 3})
    prepared = {"image_processor_type": "ViTImageProcessor", "size": 16, "image_mean": [0.5], "image_std": [0.25]}
    (found / "preprocessor_config.json").write_text(json.dumps(prepared))
    return found


def png(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    target = BytesIO()
    Image.fromarray(pixels).save(target, "PNG")
    return target.getvalue()


def written(folder: Path, texts: list[str | None], **columns: Any) -> Path:
    names = [f"p{i}" for i in range(len(texts))]
    pictures = [png(i) for i in range(len(texts))]
    held = {"picture": pictures, "caption": pa.array(texts, type=pa.string()), "name": names, **columns}
    pq.write_table(pa.table(held), folder / "pairs.parquet", row_group_size=4)
    return folder


def spec_of(folder: Path, arguments: str = ARGUMENTS, text: str = "{}", threshold: float = 0.0) -> Any:
    path = folder / "job.yaml"
    path.write_text(SPEC.format(folder=folder, arguments=arguments, text=text, threshold=threshold))
    return load(path)


def ids(text: str) -> list[int]:
    """[CLS], the words, [SEP]; the vocabulary begins with five special tokens."""
    return [2, *(WORDS.index(word) + 5 if word in WORDS else 1 for word in text.split()), 3]


def opened(spec: Any) -> tuple[Reader, ColumnOfText]:
    column = ColumnOfText(spec)
    return open_reader(spec.input, tokens=column), column


def test_a_column_of_text_becomes_tokens_and_their_mask(tmp_path: Path) -> None:
    """Of one length, the most that the model takes. Long texts are cut, and a null makes a bad record."""
    clip(tmp_path)
    texts = ["the cat", None, "", "big " * 40, *TEXTS[:2]]
    spec = spec_of(written(tmp_path, texts))
    reader, column = opened(spec)
    assert reader.packing is not None
    assert sorted(reader.packing.words) == ["attention_mask", "input_ids", "pixel_values"]
    assert reader.packing.words["input_ids"] == "int32[16] integer below 40"
    assert reader.packing.words["attention_mask"] == "mask_right[16] integer"
    batches = list(reader.batches(batch_size=4))
    found = [reader.packing.unpack(batch.x) for batch in batches]
    tokens = np.concatenate([values["input_ids"] for values in found])
    lengths = np.concatenate([values["attention_mask"] for values in found])
    good = [text for text in texts if text is not None]
    for row, (text, length) in enumerate(zip(good, lengths.tolist(), strict=True)):
        expected = ids(text)
        expected = expected if len(expected) <= 16 else [*expected[:15], 3]
        assert tokens[row].tolist() == expected + [0] * (16 - length)
    assert [record.reason for batch in batches for record in batch.bad] == [
        "input_ids: column 'caption' is null; expected text"
    ]
    assert [i for batch in batches for i in batch.ids] == ["p0", "p2", "p3", "p4", "p5"]
    assert column.cut == 1


def test_a_clip_scores_pictures_and_captions(tmp_path: Path) -> None:
    """As the model itself does for each record alone, with pictures prepared as its folder says; what was cut and what
    is bad is said.
    """
    clip(tmp_path)
    texts = [*TEXTS[:3], None, "red dog", "big " * 40, "mat"]
    written(tmp_path, texts)
    with open_store(resolve(str(tmp_path / "home"))) as store:
        spec = spec_of(tmp_path, threshold=0.2)
        job = run(store, dump(spec))
        said = [event.message for event in store.jobs.events(job.id)]
    assert job.state is JobState.SUCCEEDED, job.error
    assert any(
        text.endswith("preprocessor_config.json says: resized to 16x16, bilinear, mean 0.5, std 0.25") for text in said
    )
    assert any(text == "1 of 7 texts were cut to 16 tokens" for text in said), said
    table = pa.concat_tables(pq.read_table(path) for path in sorted((tmp_path / "out").glob("*.parquet")))
    rows = {row["id"]: row for row in table.to_pylist()}
    assert sorted(rows) == ["p0", "p1", "p2", "p4", "p5", "p6"]
    model = build(spec.model)
    for name, row in rows.items():
        number = int(name[1:])
        text = texts[number]
        assert text is not None
        tokens = ids(text) if len(ids(text)) <= 16 else [*ids(text)[:15], 3]
        pixels = np.asarray(Image.open(BytesIO(png(number)))).transpose(2, 0, 1).astype(np.float32)
        image = (torch.from_numpy(pixels)[None] / 255 - 0.5) / 0.25
        with torch.no_grad():
            alone = model(input_ids=torch.tensor([tokens]), pixel_values=image)
        for field in ("image_embeds", "text_embeds"):
            torch.testing.assert_close(torch.tensor(row[field]), alone[field][0], atol=1e-4, rtol=1e-3)


TWO_TOWERS = """
import torch
from torch import nn

class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.pixels = nn.Embedding(40, 4), nn.Linear(3, 4)

    def forward(self, pixel_values, input_ids, attention_mask):
        mask = attention_mask.unsqueeze(-1).to(pixel_values.dtype)
        text = (self.words(input_ids) * mask).sum(1) / mask.sum(1)
        return {"score": (text * self.pixels(pixel_values.mean((2, 3)))).sum(-1), "length": attention_mask.sum(1)}

def towers():
    return Towers()
"""


def written_csv(folder: Path, texts: list[str]) -> None:
    """Captions beside the paths of pictures."""
    with (folder / "pairs.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["name", "picture", "caption"])
        for i, text in enumerate(texts):
            (folder / f"{i}.png").write_bytes(png(i))
            lines.writerow([f"p{i}", f"{i}.png", text])


def scored(folder: Path, text: str, *edits: tuple[str, str]) -> list[dict[str, Any]]:
    """The rows of a job over pairs.csv, with these settings of texts."""
    path = folder / "job.yaml"
    said = SPEC.format(folder=folder, arguments=ARGUMENTS, text=text, threshold=0)
    for old, new in (("pairs.parquet", "pairs.csv"), ("format: parquet", "format: csv"), *edits):
        said = said.replace(old, new)
    path.write_text(said)
    spec = load(path)
    assert not look(spec, (folder,)).problems
    with open_store(resolve(str(folder / "home"))) as store:
        job = run(store, dump(spec), allow_python=(str(folder),))
    assert job.state is JobState.SUCCEEDED, job.error
    return [row for path in sorted((folder / "out").glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def test_a_clip_scores_pictures_and_captions_of_csv(tmp_path: Path) -> None:
    """With settings of texts, too: captions are cut to `max_length`, behind the prompt."""
    clip(tmp_path)
    texts = ["the cat", "big red dog", "big " * 40]
    written_csv(tmp_path, texts)
    rows = scored(tmp_path, "{max_length: 8, prompt: 'query : '}")
    model = build(load(tmp_path / "job.yaml").model)
    for row, text in zip(rows, texts, strict=True):
        tokens = ids(f"query : {text}")
        tokens = tokens if len(tokens) <= 8 else [*tokens[:7], 3]
        with torch.no_grad():
            alone = model(input_ids=torch.tensor([tokens]), pixel_values=torch.zeros(1, 3, 16, 16))
        torch.testing.assert_close(torch.tensor(row["text_embeds"]), alone["text_embeds"][0], atol=1e-4, rtol=1e-3)


def test_a_model_of_ones_own_takes_captions_of_csv(tmp_path: Path) -> None:
    """The spec names its tokenizer and the longest text; a tokenizer that is not there is an error of the spec."""
    clip(tmp_path)
    (tmp_path / "net.py").write_text(TWO_TOWERS)
    written_csv(tmp_path, ["the cat", "big red dog", "big " * 40])
    edits = (
        (f"transformers:{tmp_path}/clip", f"python:{tmp_path}/net.py:towers"),
        ("image_embeds, text_embeds, logits_per_image", "score, length"),
        ("  batch_size: 3\n", "  batch_size: 3\n  transform: {resize: 16}\n"),
    )
    rows = scored(tmp_path, f"{{tokenizer: {tmp_path}/clip, max_length: 6}}", *edits)
    assert [row["length"] for row in rows] == [4, 5, 6]
    with pytest.raises(SpecError, match=r"input\.text\.tokenizer: no file or folder .*/nothing; expected"):
        scored(tmp_path, "{tokenizer: nothing, max_length: 6}", *edits)


def test_numbers_stay_as_they_are(tmp_path: Path) -> None:
    """A column of tokens needs no tokenizer, and its mask is the caller's."""
    tokens = pa.array([[2, 7, 3]] * 5, type=pa.list_(pa.int32()))
    folder = written(tmp_path, ["x"] * 5, tokens=tokens)
    fields = FieldsSpec(x={"input_ids": "tokens"})
    spec = InputSpec(source=str(folder / "pairs.parquet"), format="parquet", fields=fields)

    def never() -> Any:
        raise AssertionError

    reader = open_reader(spec, tokens=never)
    assert reader.packing is not None
    assert reader.packing.words == {"input_ids": "int32[3] integer"}


def test_what_cannot_be_tokenized_is_refused(tmp_path: Path) -> None:
    """Before anything runs, with the reason."""
    clip(tmp_path)
    written(tmp_path, ["cat"] * 3)
    twice = spec_of(tmp_path, f"{ARGUMENTS}, attention_mask: caption")
    with pytest.raises(DataError, match=r"attention_mask is made of the text of input_ids; expected no attention_mask"):
        opened(twice)
    (tmp_path / "clip/tokenizer.json").write_text("no tokenizer")
    broken = spec_of(tmp_path)
    with pytest.raises(ModelError, match=r"cannot be read as a tokenizer"):
        opened(broken)
    assert any("cannot be read as a tokenizer" in problem for problem in look(broken).problems)


NO_PICTURE = "AttributeError: 'NoneType' object has no attribute 'shape'"
NOT_GIVEN = "pixel_values, position_ids, return_loss"
WITHOUT_PICTURES = {
    "a mapping": (
        {"format": "parquet", "fields": {"x": {"input_ids": "caption"}, "id": "name"}},
        {"fields": ["id", "text_embeds"]},
        "input.fields.x: the model cannot take a batch of 32: attention_mask, input_ids int32[16]: "
        f"{NO_PICTURE}; the model also takes {NOT_GIVEN}, which input.fields.x does not map",
    ),
    "text": (
        {"format": "text", "fields": {"x": "caption", "id": "name"}},
        {"fields": ["id", "embedding"], "pooling": "mean"},
        f"input.format: the model cannot take a batch of texts: {NO_PICTURE}; it also takes {NOT_GIVEN}, which "
        "input.format text does not give",
    ),
    "openai-batch": (
        {"format": "openai-batch"},
        {"format": "openai-batch", "fields": ["id", "embedding"], "pooling": "mean"},
        f"input.format: the model cannot take a batch of texts: {NO_PICTURE}; it also takes {NOT_GIVEN}, which "
        "input.format openai-batch does not give",
    ),
}


@pytest.mark.parametrize("kind", WITHOUT_PICTURES)
def test_texts_alone_are_not_enough_for_a_clip(kind: str, tmp_path: Path) -> None:
    """`run` says what `validate --data` says: the field, and the arguments that are not given."""
    given, output, problem = WITHOUT_PICTURES[kind]
    clip(tmp_path)
    written(tmp_path, ["cat"] * 3)
    body = {"model": "m", "input": "cat"}
    request = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": body}
    (tmp_path / "batch.jsonl").write_text(json.dumps(request))
    source = tmp_path / ("batch.jsonl" if kind == "openai-batch" else "pairs.parquet")
    job = spec_with(tmp_path, {"source": str(source), **given}, output)
    (found,) = look(job).problems
    assert found == problem
    with open_store(resolve(str(tmp_path / "home"))) as store:
        assert run(store, dump(job)).error == found


def spec_with(folder: Path, given: dict[str, Any], output: dict[str, Any], **args: Any) -> Any:
    return restore(
        {
            "version": 1,
            "name": "texts",
            "kind": "score",
            "model": {"source": f"transformers:{folder}/clip", "args": args},
            "input": given,
            "run": {"device": "cpu"},
            "output": {"path": str(folder / "out"), **output},
        }
    )


def test_the_text_side_of_a_clip_alone(tmp_path: Path) -> None:
    """`architectures` names the class of a part: texts get the projected vectors that the whole model gives them."""
    transformers = pytest.importorskip("transformers")
    clip(tmp_path)
    texts = ["the cat", "big red dog", "big " * 40]
    written(tmp_path, list(texts))
    given = {"source": str(tmp_path / "pairs.parquet"), "format": "text", "fields": {"x": "caption", "id": "name"}}
    spec = spec_with(tmp_path, given, {"fields": ["id", "text_embeds"]}, architectures=["CLIPTextModelWithProjection"])
    assert not look(spec).problems
    with open_store(resolve(str(tmp_path / "home"))) as store:
        job = run(store, dump(spec))
    assert job.state is JobState.SUCCEEDED, job.error
    model = transformers.CLIPModel.from_pretrained(tmp_path / "clip").eval()
    rows = [row for path in sorted((tmp_path / "out").glob("*.parquet")) for row in pq.read_table(path).to_pylist()]
    assert [row["id"] for row in rows] == ["p0", "p1", "p2"]
    for row, text in zip(rows, texts, strict=True):
        tokens = ids(text) if len(ids(text)) <= 16 else [*ids(text)[:15], 3]
        with torch.no_grad():
            alone = model.get_text_features(input_ids=torch.tensor([tokens])).pooler_output[0]
        torch.testing.assert_close(torch.tensor(row["text_embeds"]), alone, atol=1e-4, rtol=1e-3)


def test_the_image_side_of_a_clip_alone(tmp_path: Path) -> None:
    """As with texts; its one input needs no mapping."""
    transformers = pytest.importorskip("transformers")
    clip(tmp_path)
    x = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    spec = spec_with(
        tmp_path, {"source": "x.npy", "format": "npy"}, {}, architectures=["CLIPVisionModelWithProjection"]
    )
    whole = transformers.CLIPModel.from_pretrained(tmp_path / "clip").eval()
    with torch.no_grad():
        expected = whole.get_image_features(pixel_values=x).pooler_output
        torch.testing.assert_close(build(spec.model)(x)["image_embeds"], expected)


def test_settings_of_the_whole_hold_for_a_part(tmp_path: Path) -> None:
    """Those that the spec names and the labels; what a part does not take is refused."""
    from transformers import CLIPConfig

    CLIPConfig(architectures=["CLIPTextModel"], num_labels=5).save_pretrained(tmp_path)
    config, _ = from_transformers._configured(tmp_path, {})
    assert (type(config).__name__, config.num_labels) == ("CLIPTextConfig", 5)
    config, _ = from_transformers._configured(tmp_path, {"num_labels": 7})
    assert config.num_labels == 7
    own = CLIPConfig(architectures=["CLIPTextModel"], text_config={"id2label": {0: "no", 1: "yes", 2: "maybe"}})
    own.save_pretrained(tmp_path / "own")
    config, _ = from_transformers._configured(tmp_path / "own", {})
    assert config.id2label == {0: "no", 1: "yes", 2: "maybe"}
    with pytest.raises(ModelError, match=r"model\.args\.logit_scale_init_value: CLIPTextModel has no such entry"):
        from_transformers._configured(tmp_path, {"logit_scale_init_value": 1.0})
