"""A spec is refused with the words in which its job would fail over a folder of sentence-transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nimble_jobs import spec
from nimble_jobs.errors import ModelError, SpecError
from nimble_jobs.sentence import resolve
from nimble_jobs.spec.model import JobSpec
from nimble_jobs.workloads.text.setup import set_up
from tests.text_models import rewrite, write_tokenizer

OLD = "sentence_transformers.models."
PROMPTS = {"prompts": {"query": "query: ", "plain": ""}, "default_prompt_name": "query"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sentence model without weights, and a file of texts."""
    made = tmp_path / "m"
    for name in ("1_Pooling", "2_Dense"):
        (made / name).mkdir(parents=True)
    write_tokenizer(made)
    rewrite(made / "config.json", model_type="bert", vocab_size=40, max_position_embeddings=64)
    modules(made, "Transformer", "Pooling")
    rewrite(made / "1_Pooling" / "config.json", pooling_mode_mean_tokens=True)
    (tmp_path / "texts.jsonl").write_text('{"x": "the cat"}\n')
    return made


def modules(folder: Path, *kinds: str) -> None:
    places = {"Pooling": "1_Pooling", "Dense": "2_Dense"}
    (folder / "modules.json").write_text(
        json.dumps([{"type": f"{OLD}{kind}", "path": places.get(kind, "")} for kind in kinds])
    )


def write_spec(folder: Path, text: Any = None, **output: Any) -> Path:
    """A line for each field, so that messages name different ones."""
    made = {
        "version": 1,
        "name": "texts",
        "kind": "score",
        "model": {"source": "transformers:m"},
        "input": {"source": "texts.jsonl", "format": "text", **({"text": text} if text is not None else {})},
        "output": {"path": "out", "fields": ["id", "embedding"], **output},
    }
    path = folder.parent / "job.yaml"
    path.write_text(json.dumps(made, indent=1))
    return path


def wrong_of(path: Path) -> list[str]:
    """What is wrong with the spec, without the file's name; lines are replaced by what stands on them."""
    lines = path.read_text().splitlines()
    with pytest.raises(SpecError) as caught:
        spec.load(path)
    found = []
    for message in str(caught.value).splitlines():
        number, _, rest = message.removeprefix(f"{path}:").partition(": ")
        found.append(f"{lines[int(number) - 1].strip().split(':')[0]} {rest}")
    return found


def unread(path: Path) -> JobSpec:
    """The spec as a job has it that was queued before the folder changed."""
    return spec.load(path, check_files=False)


STRANGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a module": (
        lambda m: modules(m, "Transformer", "Pooling", "LSTM"),
        f"{{m}}/modules.json: module 2 is {OLD}LSTM; expected a Transformer, then Pooling, then any of Dense, Dropout "
        "and Normalize",
    ),
    "a flag": (
        lambda m: rewrite(m / "1_Pooling" / "config.json", pooling_mode_new_tokens=True),
        "{m}/1_Pooling/config.json: 'pooling_mode_new_tokens' is not understood; expected any of pooling_mode, "
        "pooling_mode_cls_token, pooling_mode_max_tokens, pooling_mode_mean_tokens, pooling_mode_mean_sqrt_len_tokens, "
        "pooling_mode_weightedmean_tokens, pooling_mode_lasttoken",
    ),
    "another output": (
        lambda m: rewrite(m / "sentence_bert_config.json", transformer_task="fill-mask"),
        "{m}/sentence_bert_config.json: transformer_task is 'fill-mask'; expected feature-extraction",
    ),
}


@pytest.mark.parametrize("pooling", [None, "cls"])
@pytest.mark.parametrize("name", STRANGE)
def test_what_is_not_understood(name: str, pooling: str | None, folder: Path) -> None:
    """It matters for embeddings only, also if the spec says how to pool."""
    change, message = STRANGE[name]
    assert spec.load(write_spec(folder))
    change(folder)
    expected = f"output.fields: no embedding: {message.replace('{m}', str(folder))}"
    path = write_spec(folder, **({"pooling": pooling} if pooling else {}))
    assert wrong_of(path) == [f'"fields" {expected}']
    with pytest.raises(ModelError) as raised:
        resolve(folder, pooling, None)
    assert str(raised.value) == expected
    assert spec.load(write_spec(folder, fields=["id", "last_hidden_state"]))


def test_all_problems_are_named_at_once(folder: Path) -> None:
    modules(folder, "Transformer", "Pooling", "LSTM", "CNN")
    assert [message.split(" is ")[1].split(";")[0] for message in wrong_of(write_spec(folder))] == [
        f"{OLD}LSTM",
        f"{OLD}CNN",
    ]


def test_a_malformed_folder(folder: Path) -> None:
    """It is refused whatever the job asks for, because its longest text and its prompt are read from it."""
    (folder / "1_Pooling" / "config.json").write_text("{")
    for fields in (["id", "embedding"], ["id", "last_hidden_state"]):
        path = write_spec(folder, fields=fields)
        (message,) = wrong_of(path)
        with pytest.raises(ModelError) as raised:
            set_up(unread(path))
        assert message == f'"source" model.source: {raised.value}'
        assert f"{folder}/1_Pooling/config.json: not JSON: " in message


@pytest.mark.parametrize(
    ("text", "line"),
    [(None, "source"), ({"prompt": "query: "}, "prompt"), ({"prompt_name": "query"}, "prompt_name")],
    ids=str,
)
def test_prompts_that_the_pooling_leaves_out(text: Any, line: str, folder: Path) -> None:
    """The default prompt, one that the spec gives, and one by its name."""
    rewrite(folder / "config_sentence_transformers.json", **PROMPTS)
    path = write_spec(folder, text)
    assert spec.load(path)
    rewrite(folder / "1_Pooling" / "config.json", include_prompt=False)
    expected = (
        f"input.text.prompt: {folder}/1_Pooling/config.json: include_prompt is false: this model's pooling leaves out "
        "the prompt's tokens, which nimble-jobs cannot do; expected prompt: '', or a model that pools all tokens"
    )
    assert wrong_of(path) == [f'"{line}" {expected}']
    with pytest.raises(ModelError) as raised:
        set_up(unread(path))
    assert str(raised.value) == expected


@pytest.mark.parametrize("text", [{"prompt": ""}, {"prompt_name": "plain"}], ids=str)
def test_empty_prompts_may_be_left_out(text: Any, folder: Path) -> None:
    rewrite(folder / "config_sentence_transformers.json", **PROMPTS)
    rewrite(folder / "1_Pooling" / "config.json", include_prompt=False)
    assert spec.load(write_spec(folder, text))
    assert set_up(unread(write_spec(folder, text))).tokenizer.rules.prompt == ""
    assert spec.load(write_spec(folder, fields=["id", "last_hidden_state"]))  # nothing is pooled
