"""Jobs over texts from end to end: what comes out equals the model's own outputs for one text at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from nimble_jobs.models.build import build
from nimble_jobs.spec.model import ModelSpec
from tests.cli import Answer, Cli
from tests.text_models import TEXTS, rewrite, seeded, write_bert, write_sentence_model, write_tokenizer

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

NAMES = {"id2label": {"0": "O", "1": "PER", "2": "LOC"}}


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path / "home", capsys)


def job(folder: Path, fields: Sequence[str], *, texts: Sequence[str] = TEXTS, text: Any = None, **output: Any) -> Path:
    """A job over a folder with a model in `m`. Texts of several lengths go to two buckets."""
    (folder / "in.jsonl").write_text("".join(json.dumps({"id": f"r{i}", "x": t}) + "\n" for i, t in enumerate(texts)))
    spec = {
        "version": 1,
        "name": "texts",
        "kind": "score",
        "model": {"source": "transformers:m"},
        "input": {
            "source": "in.jsonl", "format": "text", "fields": {"id": "id"},
            "text": {"buckets": [8, 24], **(text or {})},
        },
        "schedule": {"on_miss": "eager"},
        "output": {"path": "out", "fields": list(fields), "shard_size": 3, "if_exists": "replace", **output},
        "run": {"device": "cpu"},
    }  # fmt: skip
    (folder / "job.yaml").write_text(json.dumps(spec))
    return folder / "job.yaml"


# By schedules, of which one for all lengths will do.
BUILT = ("schedule.on_miss=build", "schedule.progressive=false", "input.text.buckets=[24]")


def run(cli: Cli, path: Path, *more: str) -> list[dict[str, Any]]:
    answer = cli("run", str(path), *more)
    assert answer.code == 0, answer.err
    return rows(path.parent / "out")


def rows(out: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for part in sorted(out.glob("part-*")):
        if part.suffix == ".parquet":
            found += pq.read_table(part).to_pylist()
        else:
            found += [json.loads(line) for line in part.read_text().splitlines()]
    return found


def encoded(folder: Path, text: str) -> Any:
    return tokenizers.Tokenizer.from_file(str(folder / "m" / "tokenizer.json")).encode(text)


def alone(folder: Path, text: str, **spec: Any) -> dict[str, np.ndarray]:
    """The model's outputs for one text, without padding."""
    with torch.no_grad():
        made = build(ModelSpec(source=f"transformers:{folder / 'm'}", **spec))(
            input_ids=torch.tensor([encoded(folder, text).ids])
        )
    return {name: tensor[0].numpy() for name, tensor in made.items()}


def close(found: Any, expected: np.ndarray) -> None:
    np.testing.assert_allclose(np.array(found), expected, rtol=1e-4, atol=1e-5)


def test_embeddings_of_a_sentence_model(cli: Cli, tmp_path: Path) -> None:
    """A folder of sentence-transformers, its default prompt, its layers: all without a word in the spec."""
    package = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    layers = (modules.Pooling(16, "mean"), seeded(modules.Dense(16, 8)), modules.Normalize())
    folder = write_sentence_model(tmp_path / "m", write_bert(tmp_path / "base"), *layers, max_seq_length=14)
    rewrite(
        folder / "config_sentence_transformers.json",
        prompts={"query": "query : ", "q": ""},
        default_prompt_name="query",
    )
    found = run(cli, job(tmp_path, ["id", "embedding", "token_count"], text={"buckets": [8]}))
    model = package.SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    for row, text in zip(found, TEXTS, strict=True):
        close(row["embedding"], model.encode([text], show_progress_bar=False)[0])
        assert row["token_count"] == min(14, len(encoded(tmp_path, f"query : {text}").ids))


def test_embeddings_as_the_spec_says(cli: Cli, tmp_path: Path) -> None:
    """A plain encoder; by a schedule, and in half precision, too."""
    write_bert(tmp_path / "m")
    path = job(tmp_path, ["id", "embedding"], pooling="cls", normalize=False, format="jsonl")
    for more in ((), BUILT):
        for row, text in zip(run(cli, path, *more), TEXTS, strict=True):
            close(row["embedding"], alone(tmp_path, text)["last_hidden_state"][0])
    path = job(tmp_path, ["embedding"], pooling="mean", normalize=True)
    for row, text in zip(run(cli, path, "model.dtype=bf16"), TEXTS, strict=True):
        plain = alone(tmp_path, text)["last_hidden_state"].mean(axis=0)
        assert np.abs(np.array(row["embedding"]) - plain / np.linalg.norm(plain)).max() < 0.05


@pytest.mark.parametrize("cls", ["BertForMaskedLM", "BertForQuestionAnswering", "BertForTokenClassification"])
def test_embeddings_of_a_checkpoint_without_a_pooler(cls: str, cli: Cli, tmp_path: Path) -> None:
    """Heads for tokens are saved without one. No random pooler takes its place: there is no `pooler_output` then."""
    write_bert(tmp_path / "m", cls=cls)
    path = job(tmp_path, ["id", "embedding"], pooling="mean")
    whole = getattr(pytest.importorskip("transformers"), cls).from_pretrained(tmp_path / "m").eval()
    for more in ((), BUILT):
        for row, text in zip(run(cli, path, *more), TEXTS, strict=True):
            with torch.no_grad():
                expected = whole.bert(torch.tensor([encoded(tmp_path, text).ids])).last_hidden_state[0].mean(dim=0)
            close(row["embedding"], expected.numpy())
    answer = cli("run", str(job(tmp_path, ["embedding", "pooler_output"], pooling="mean")))
    assert answer.code == 100
    assert "the model returns no 'pooler_output'" in answer.err


@pytest.mark.parametrize("kind", ["T5", "UMT5", "MT5"])
def test_embeddings_of_an_encoder_that_was_saved_alone(kind: str, cli: Cli, tmp_path: Path) -> None:
    """Its folder names the encoder's class, and may say that there is no decoder."""
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}Config")(vocab_size=40, **sizes)
    getattr(transformers, f"{kind}EncoderModel")(made).save_pretrained(tmp_path / "m")
    rewrite(tmp_path / "m" / "config.json", is_encoder_decoder=False)
    write_tokenizer(tmp_path / "m")
    encoder = getattr(transformers, f"{kind}EncoderModel").from_pretrained(tmp_path / "m").eval()
    for row, text in zip(run(cli, job(tmp_path, ["id", "embedding"], pooling="mean")), TEXTS, strict=True):
        with torch.no_grad():
            expected = encoder(torch.tensor([encoded(tmp_path, text).ids])).last_hidden_state[0].mean(dim=0)
        close(row["embedding"], expected.numpy())


def test_weights_that_are_missing_elsewhere_are_refused(cli: Cli, tmp_path: Path) -> None:
    """A layer that the checkpoint lacks is no pooler, and would be random, too."""
    weights = write_bert(tmp_path / "m", cls="BertForMaskedLM") / "model.safetensors"
    torches = pytest.importorskip("safetensors.torch")
    kept = torches.load_file(weights)
    del kept["bert.encoder.layer.1.output.dense.weight"]
    torches.save_file(kept, weights, metadata={"format": "pt"})
    answer = cli("run", str(job(tmp_path, ["embedding"], pooling="mean")))
    assert answer.code == 100
    assert "its weights do not fit BertModel" in answer.err
    assert "encoder.layer.1.output.dense.weight" in answer.err


@pytest.mark.parametrize("format_", ["parquet", "jsonl"])
def test_classes_of_texts(format_: str, cli: Cli, tmp_path: Path) -> None:
    """Names and probabilities as those of each text alone; sigmoids where labels are many."""
    write_bert(tmp_path / "m", cls="BertForSequenceClassification", num_labels=3)
    rewrite(tmp_path / "m" / "config.json", **NAMES)
    fields = ["id", "top1_label", "probability", "probabilities"]
    for problem in (None, "multi_label_classification"):
        rewrite(tmp_path / "m" / "config.json", problem_type=problem)
        for i, row in enumerate(run(cli, job(tmp_path, fields, format=format_))):
            logits = alone(tmp_path, TEXTS[i])["logits"]
            shares = 1 / (1 + np.exp(-logits)) if problem else np.exp(logits) / np.exp(logits).sum()
            assert (row["id"], row["top1_label"]) == (f"r{i}", ["O", "PER", "LOC"][logits.argmax()])
            close(row["probabilities"], shares)
            close(row["probability"], shares.max())


def test_scores_of_pairs(cli: Cli, tmp_path: Path) -> None:
    """A cross-encoder with one class gives a score; asking it for classes is an error that says so."""
    write_bert(tmp_path / "m", cls="BertForSequenceClassification", num_labels=1)
    found = run(cli, job(tmp_path, ["id", "score"]))
    for row, text in zip(found, TEXTS, strict=True):
        close(row["score"], alone(tmp_path, text)["logits"][0])
    answer = cli("run", str(job(tmp_path, ["id", "top1"])))
    assert answer.code == 100
    assert "top1 needs several classes; this model has one, so its result is score" in answer.err


@pytest.mark.parametrize("format_", ["parquet", "jsonl"])
def test_labels_of_tokens(format_: str, cli: Cli, tmp_path: Path) -> None:
    """Lists as long as each text has tokens: ids, places in the text, names, probabilities, and the logits."""
    write_bert(tmp_path / "m", cls="BertForTokenClassification", num_labels=3)
    rewrite(tmp_path / "m" / "config.json", **NAMES)
    fields = ["id", "tokens", "offsets", "token_labels", "token_probabilities", "logits", "token_count"]
    for i, row in enumerate(run(cli, job(tmp_path, fields, format=format_))):
        one, logits = encoded(tmp_path, TEXTS[i]), alone(tmp_path, TEXTS[i])["logits"]
        assert row["tokens"] == one.ids
        assert [tuple(pair) for pair in row["offsets"]] == one.offsets
        words = [TEXTS[i][begin:end] for begin, end in row["offsets"]]
        assert words == ["", *TEXTS[i].split(), ""]
        assert row["token_labels"] == [["O", "PER", "LOC"][k] for k in logits.argmax(axis=1)]
        close(row["token_probabilities"], (np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)).max(axis=1))
        close(row["logits"], logits)
        assert row["token_count"] == len(one.ids)


def test_spans_of_answers(cli: Cli, tmp_path: Path) -> None:
    """Question answering: the scores of tokens to begin or end an answer, without padding."""
    write_bert(tmp_path / "m", cls="BertForQuestionAnswering")
    for row, text in zip(run(cli, job(tmp_path, ["start_logits", "end_logits"])), TEXTS, strict=True):
        expected = alone(tmp_path, text)
        close(row["start_logits"], expected["start_logits"])
        close(row["end_logits"], expected["end_logits"])


@pytest.mark.parametrize(
    ("cls", "fields", "problem"),
    [
        ("BertForSequenceClassification", ["id", "top1_label", "probabilities", "token_count", "logits"], None),
        ("BertForTokenClassification", ["token_labels", "token_probabilities", "offsets", "logits"], None),
        ("BertForQuestionAnswering", ["start_logits", "end_logits"], None),
        ("BertModel", ["pooler_output", "last_hidden_state"], None),
        ("BertModel", ["embedding"], None),
        ("BertForSequenceClassification", ["id", "logitz"], "the model returns no 'logitz'; it returns logits"),
        ("BertModel", ["pooled"], "the model returns no 'pooled'; it returns last_hidden_state, pooler_output"),
        ("BertForSequenceClassification", ["score"], "score needs a model of one class; this one has 3"),
    ],
)
def test_validate_finds_fields_that_the_model_does_not_have(
    cls: str, fields: list[str], problem: str | None, cli: Cli, tmp_path: Path
) -> None:
    """Before the job runs, with the words of the job."""
    write_bert(tmp_path / "m", cls=cls, **({"num_labels": 3} if "Class" in cls else {}))
    if "Class" in cls:
        rewrite(tmp_path / "m" / "config.json", **NAMES)
    pooling = {"pooling": "mean"} if "embedding" in fields else {}
    path = job(tmp_path, fields, **pooling)
    answer = cli("validate", str(path), "--data")
    if problem is None:  # other tests run jobs with these
        assert answer.code == 0, answer.err
        outputs = {
            "BertModel": "last_hidden_state, pooler_output",
            "BertForQuestionAnswering": "start_logits, end_logits",
        }
        assert (f"data.outputs: {outputs.get(cls, 'logits')}\n" in answer.out) == ("embedding" not in fields)
    else:
        assert answer.code != 0
        assert f"output.fields: {problem}" in answer.err
        assert problem in cli("run", str(path)).err


def test_sizes_that_equal_a_bucket_by_chance_are_not_cut(cli: Cli, tmp_path: Path) -> None:
    """Two axes of 16: the features of a text are not taken for its tokens."""
    write_bert(tmp_path / "m")
    found = run(cli, job(tmp_path, ["pooler_output", "last_hidden_state"], text={"buckets": [16]}))
    for row, text in zip(found, TEXTS, strict=True):
        expected = alone(tmp_path, text)
        close(row["pooler_output"], expected["pooler_output"])
        close(row["last_hidden_state"], expected["last_hidden_state"])


@pytest.mark.parametrize("more", [(), BUILT])
def test_hidden_states_of_layers(more: tuple[str, ...], cli: Cli, tmp_path: Path) -> None:
    """By dotted names, cut to the text's tokens, if the configuration asks for them."""
    write_bert(tmp_path / "m")
    path = job(tmp_path, ["hidden_states.0", "hidden_states.1", "embedding"], pooling="mean")
    failed = cli("run", str(path))
    assert "the model returns no 'hidden_states.0'" in failed.err
    found = run(cli, path, "model.args.output_hidden_states=true", *more)
    for row, text in zip(found, TEXTS, strict=True):
        tokens = torch.tensor([encoded(tmp_path, text).ids])
        made = build(ModelSpec(source=f"transformers:{tmp_path / 'm'}", args={"output_hidden_states": True}))
        with torch.no_grad():
            expected = made(input_ids=tokens)
        for layer in (0, 1):
            close(row[f"hidden_states.{layer}"], expected["hidden_states"][layer][0].numpy())
        close(row["embedding"], expected["last_hidden_state"][0].mean(0).numpy())


@pytest.mark.parametrize(
    ("text", "cut"), [({"prompt": "query : "}, slice(0, None)), ({"max_length": 6, "buckets": [6]}, slice(0, 4))]
)
def test_offsets_are_those_of_the_text_itself(text: dict[str, Any], cut: slice, cli: Cli, tmp_path: Path) -> None:
    """The prompt has none, and long texts keep their places."""
    write_bert(tmp_path / "m")
    for row, given in zip(run(cli, job(tmp_path, ["offsets"], text=text)), TEXTS, strict=True):
        words = [given[begin:end] for begin, end in row["offsets"] if end]
        assert words == given.split()[cut]


def test_offsets_of_texts_that_lose_their_beginning(cli: Cli, tmp_path: Path) -> None:
    """Counted from the beginning of the whole text, however much of it was read."""
    write_bert(tmp_path / "m")
    long = "the big house . " * 400 + "a red dog"
    (row,) = run(
        cli, job(tmp_path, ["offsets"], texts=[long], text={"max_length": 5, "truncate": "start", "buckets": "auto"})
    )
    assert [long[begin:end] for begin, end in row["offsets"] if end] == ["a", "red", "dog"]
    assert row["offsets"][-2] == [len(long) - 3, len(long)]


def test_lower_case_of_a_folder(cli: Cli, tmp_path: Path) -> None:
    """Before anything else, as sentence-transformers does; places stay those of the text as it was."""
    write_bert(tmp_path / "m")
    write = {"modules.json": [], "sentence_bert_config.json": {"do_lower_case": True, "max_seq_length": 20}}
    old = "sentence_transformers.models."
    write["modules.json"] = [{"type": f"{old}Transformer", "path": ""}, {"type": f"{old}Pooling", "path": "1_Pooling"}]
    for name, value in write.items():
        (tmp_path / "m" / name).write_text(json.dumps(value))
    (tmp_path / "m" / "1_Pooling").mkdir()
    (tmp_path / "m" / "1_Pooling" / "config.json").write_text("{}")
    text = "İ THE Cat"  # the first character becomes two
    (row,) = run(cli, job(tmp_path, ["tokens", "offsets"], texts=[text], text={"buckets": "auto"}))
    assert [text[begin:end] for begin, end in row["offsets"] if end][-2:] == ["THE", "Cat"]
    assert row["tokens"][-3:-1] == encoded(tmp_path, "the cat").ids[1:-1]


def test_outputs_that_cannot_be_columns(cli: Cli, tmp_path: Path) -> None:
    """npy holds no lists of different lengths; attention has the length of a text in two axes."""
    write_bert(tmp_path / "m", cls="BertForTokenClassification", num_labels=3)

    def failed(path: Path, *more: str) -> Answer:
        answer = cli("run", str(path), *more)
        assert answer.code in (2, 100)
        return answer

    answer = failed(job(tmp_path, ["id", "offsets"], format="npy"))
    assert "output.fields[1]: offsets is a list whose length differs from text to text" in answer.err
    assert "logits has as many values as a text has tokens" in failed(job(tmp_path, ["logits"], format="npy")).err
    assert "the model returns no 'nothing'; it returns logits" in failed(job(tmp_path, ["nothing"])).err
    assert "need scores of shape [batch, classes]" in failed(job(tmp_path, ["top1"])).err
    write_bert(tmp_path / "m2", cls="BertModel")
    path = job(tmp_path, ["token_labels"])
    answer = failed(path, "model.source=transformers:m2")
    assert (
        "token_labels needs logits of shape [batch, tokens, classes]; the model returns last_hidden_state" in answer.err
    )


def test_a_prompt_by_its_name(cli: Cli, tmp_path: Path) -> None:
    """Another one than the default; an empty prompt means none; a name that is gone fails the job."""
    pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    folder = write_sentence_model(tmp_path / "m", write_bert(tmp_path / "base"), modules.Pooling(16))
    settings = folder / "config_sentence_transformers.json"
    rewrite(settings, prompts={"query": "query : ", "passage": "passage : the "}, default_prompt_name="query")
    for text, before in (({}, 2), ({"prompt_name": "passage"}, 3), ({"prompt": ""}, 0)):
        found = run(cli, job(tmp_path, ["token_count"], text=text))
        assert [row["token_count"] for row in found] == [len(given.split()) + 2 + before for given in TEXTS]
    rewrite(tmp_path / "m" / "1_Pooling" / "config.json", include_prompt=False)
    answer = cli("run", str(job(tmp_path, ["embedding"], text={"prompt_name": "query"})))
    assert answer.code == 2
    assert "1_Pooling/config.json: include_prompt is false: this model's pooling leaves out the prompt's" in answer.err
    assert len(run(cli, job(tmp_path, ["embedding"], text={"prompt": ""}))) == len(TEXTS)


def test_what_a_head_returns_is_missed_where_the_model_is_pooled(cli: Cli, tmp_path: Path) -> None:
    """Its outputs are known once it runs; the message says why they are not there, and each job alone works."""
    write_bert(tmp_path / "m", cls="BertForSequenceClassification", num_labels=3)
    answer = cli("run", str(job(tmp_path, ["embedding", "start_logits"], pooling="mean")))
    assert answer.code == 100
    assert "no 'start_logits', because its head is left out to pool tokens into embedding; it returns " in answer.err
    assert "comes from the model's head" in cli("run", str(job(tmp_path, ["embedding", "top1"], pooling="mean"))).err
    for fields, pooling in ((["embedding"], "mean"), (["top1"], None)):
        assert len(run(cli, job(tmp_path, fields, pooling=pooling))) == len(TEXTS)
