"""Prompts that leave no room for the text behind them are refused; others count among the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nimble_jobs import spec as specs
from nimble_jobs.errors import ModelError
from nimble_jobs.workloads.look import look
from nimble_jobs.workloads.text.setup import TextSetup, set_up
from tests.text_jobs import text_spec, write_texts
from tests.text_models import rewrite, write_bert

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

PROMPT = "the cat sat on "  # six tokens with [CLS] and [SEP], without a word for its last space


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_bert(tmp_path / "m")


def spec_with(folder: Path, model: Path, **text: Any) -> specs.JobSpec:
    source = write_texts(folder / "t.parquet", ["dog mat"])
    return specs.restore(text_spec(folder, model, source, input={"text": text}))


def opened(folder: Path, model: Path, **text: Any) -> TextSetup:
    return set_up(spec_with(folder, model, **text))


@pytest.mark.parametrize("truncate", ["end", "start", "error"])
@pytest.mark.parametrize("limit", [5, 6])
def test_a_prompt_that_leaves_no_room(limit: int, truncate: str, model: Path, tmp_path: Path) -> None:
    """Each record would be cut to the prompt, lose a part of the prompt, or be bad."""
    expected = (
        f"input.text.prompt: the prompt has 6 tokens, special ones included, but a record has at most {limit} "
        f"(input.text.max_length), so it does not fit beside a text; expected at most {limit - 1}"
    )
    with pytest.raises(ModelError) as caught:
        opened(tmp_path, model, prompt=PROMPT, max_length=limit, truncate=truncate)
    assert str(caught.value) == expected
    spec = spec_with(tmp_path, model, prompt=PROMPT, max_length=limit, truncate=truncate)
    assert expected in look(spec, ()).problems


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT.strip()])
def test_a_prompt_that_leaves_room_for_one_token(prompt: str, model: Path, tmp_path: Path) -> None:
    """The text's other tokens are cut, and that is counted."""
    made = opened(tmp_path, model, prompt=prompt, max_length=7).tokenizer
    found = made([" dog mat", " dog", ""])
    assert (found.lengths.tolist(), found.shortened.tolist()) == ([7, 7, 6], [True, False, False])
    assert found.ids[5:7].tolist() == [8, 3]  # dog [SEP]


@pytest.mark.parametrize(
    ("text", "field", "which"),
    [
        ({}, "prompt", "the model's default prompt"),
        ({"prompt_name": "long"}, "prompt_name", "the prompt"),
    ],
)
def test_prompts_of_the_model(text: dict[str, str], field: str, which: str, model: Path, tmp_path: Path) -> None:
    """They are refused too, unless the spec says that there is none."""
    settings = {"prompts": {"long": PROMPT}, "default_prompt_name": "long"}
    rewrite(model / "config_sentence_transformers.json", **settings)
    with pytest.raises(ModelError, match=rf"^input\.text\.{field}: {which} has 6 tokens"):
        opened(tmp_path, model, max_length=6, **text)
    assert opened(tmp_path, model, max_length=6, prompt="").limit == 6
