"""Every mistake in a spec of texts gives exactly its lines; what a model's folder says fills in the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from nimble_jobs import spec
from nimble_jobs.errors import SpecError
from nimble_jobs.spec.text_model import text_model
from tests.bad_texts import BAD_TEXTS, TEXTS, BadText, lay_out
from tests.text_models import rewrite


@pytest.mark.parametrize("bad", BAD_TEXTS, ids=lambda bad: bad.name)
def test_bad_spec(bad: BadText, tmp_path: Path) -> None:
    """All problems come at once, one line each."""
    path = bad.write(tmp_path)
    with pytest.raises(SpecError) as caught:
        spec.load(path)
    assert str(caught.value).splitlines() == bad.lines(path)


def test_the_spec_that_the_table_starts_from_is_right(tmp_path: Path) -> None:
    lay_out(tmp_path)
    (tmp_path / "job.yaml").write_text(TEXTS)
    loaded = spec.load(tmp_path / "job.yaml")
    assert loaded.input.text is not None
    assert (loaded.input.text.max_length, loaded.input.fields.columns) == (64, ("body",))
    assert spec.restore(spec.dump(loaded)) == loaded


def test_a_spec_of_pairs_and_buckets_survives_storage(tmp_path: Path) -> None:
    lay_out(tmp_path)
    pairs = TEXTS.replace("x: body", "x: [question, passage]").replace("max_length: 64", "buckets: [32, 64, 128]")
    (tmp_path / "job.yaml").write_text(pairs)
    loaded = spec.load(tmp_path / "job.yaml")
    assert loaded.input.fields.columns == ("question", "passage")
    assert spec.restore(spec.dump(loaded)) == loaded


def test_what_a_folder_says(tmp_path: Path) -> None:
    """The least of all limits counts as usual; positions that begin behind the padding's are fewer."""
    lay_out(tmp_path)
    assert (text_model(tmp_path / "bert").positions, text_model(tmp_path / "bert").limit) == (128, 128)
    assert text_model(tmp_path / "roberta").positions == 128
    rewrite(tmp_path / "bert" / "tokenizer_config.json", model_max_length=1e30)
    assert text_model(tmp_path / "bert").limit == 128
    rewrite(tmp_path / "bert" / "sentence_bert_config.json", max_seq_length=100)
    assert text_model(tmp_path / "bert").limit == 100
    (tmp_path / "bert" / "config.json").write_text("[")
    assert text_model(tmp_path / "bert").positions is None
    assert text_model(tmp_path / "none").limit is None


def test_a_file_that_is_too_large_is_a_problem_of_the_spec(tmp_path: Path) -> None:
    """It is not passed over, since it may say how texts are split or cut."""
    lay_out(tmp_path)
    (tmp_path / "job.yaml").write_text(TEXTS)
    rewrite(tmp_path / "bert" / "tokenizer_config.json", note="x" * (16 << 20))
    with pytest.raises(SpecError, match=r"model\.source: .*tokenizer_config\.json: larger than 16 MiB"):
        spec.load(tmp_path / "job.yaml")


@pytest.mark.parametrize(
    "kind",
    [
        *("roberta-prelayernorm", "xmod", "luke", "ibert", "lilt", "layoutlmv3", "markuplm"),
        *("altclip_text_model", "bridgetower_text_model", "clap_text_model"),
    ],
)
def test_models_whose_positions_begin_behind_the_padding(tmp_path: Path, kind: str) -> None:
    rewrite(tmp_path / "config.json", model_type=kind, max_position_embeddings=66, pad_token_id=1)
    assert text_model(tmp_path).positions == 64


def test_positions_by_the_name_of_gpt2(tmp_path: Path) -> None:
    """T5 writes it, too, where it limits nothing."""
    rewrite(tmp_path / "config.json", model_type="gpt2", n_positions=64)
    assert text_model(tmp_path).positions == 64
    rewrite(tmp_path / "config.json", model_type="t5")
    assert text_model(tmp_path).positions is None
