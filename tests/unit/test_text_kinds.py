"""Kinds of models that padding disturbs although they are given a mask. Jobs over texts refuse them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nimble_jobs import spec as specs
from nimble_jobs.errors import ModelError
from nimble_jobs.workloads.text.setup import set_up
from tests.cli import Cli
from tests.text_jobs import outputs, text_spec, write_texts
from tests.text_models import TEXTS, write_tokenizer

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 128,
}  # fmt: skip
NARROW = {"embedding_size": 32, "true_hidden_size": 16, "intra_bottleneck_size": 16}
FUNNEL = {"vocab_size": 64, "block_sizes": [1, 1], "d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 64}
REFORMER = {
    "vocab_size": 64, "hidden_size": 32, "axial_pos_shape": (8, 16), "axial_pos_embds_dim": (16, 16),
    "attn_layers": ["local", "lsh"], "max_position_embeddings": 128, "num_buckets": 4, "is_decoder": False,
    "lsh_attn_chunk_length": 16, "local_attn_chunk_length": 16, "pad_token_id": 0,
}  # fmt: skip
SPARSE = {"block_size": 4, "num_random_blocks": 1}
XLNET = {"vocab_size": 64, "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64, "pad_token_id": 0}
XLM = {"vocab_size": 64, "emb_dim": 32, "n_layers": 2, "n_heads": 2, "pad_token_id": 0}
OTHERS = "a model that gives a padded text the result of the text alone, such as BERT"
FEELS = "whose results depend on how far a text is padded"
SUMMARY = "which takes padding for a part of the text"

CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "canine": ("CanineModel", {name: SIZES[name] for name in list(SIZES)[1:5]}, FEELS),
    "convbert": ("ConvBertModel", {**SIZES, "embedding_size": 32}, FEELS),
    "funnel": ("FunnelModel", FUNNEL, FEELS),
    "mobilebert": ("MobileBertModel", {**SIZES, **NARROW}, FEELS),
    "nystromformer": ("NystromformerModel", SIZES, FEELS),
    "reformer": ("ReformerModel", REFORMER, FEELS),
    "yoso": ("YosoModel", SIZES, FEELS),
    "big_bird": ("BigBirdModel", {**SIZES, **SPARSE}, "where sparse attention depends on how far a text is padded"),
    "xlnet": ("XLNetForSequenceClassification", XLNET, SUMMARY),
    "xlm": ("XLMForSequenceClassification", {**XLM, "summary_type": "last"}, SUMMARY),
    "flaubert": ("FlaubertForSequenceClassification", {**XLM, "summary_type": "mean"}, SUMMARY),
}
BEHIND = {**SIZES, "max_position_embeddings": 130}  # two places are never used
SMALL = {"vocab_size": 64, "max_position_embeddings": 128}
NEO = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "window_size": 8,
    "attention_types": [[["global", "local"], 1]],
}
PERCEIVER = {
    "d_model": 32, "d_latents": 32, "num_latents": 8, "num_self_attends_per_block": 2, "num_self_attention_heads": 2,
    "num_cross_attention_heads": 2,
}  # fmt: skip
FINE: dict[str, tuple[str, dict[str, Any]]] = {
    "no trigrams": ("MobileBertModel", {**SIZES, **NARROW, "trigram_input": False}),
    "whole attention": ("BigBirdModel", {**SIZES, **SPARSE, "attention_type": "original_full"}),
    "vectors": ("XLNetModel", XLNET),
    "layoutlm": ("LayoutLMModel", SIZES),
    "layoutlmv3": ("LayoutLMv3Model", {**BEHIND, "coordinate_size": 4, "shape_size": 8, "visual_embed": False}),
    "lilt": ("LiltModel", {**BEHIND, "hidden_size": 48, "max_2d_position_embeddings": 64}),
    "markuplm": ("MarkupLMModel", BEHIND),
    "gpt_neo": ("GPTNeoModel", {**SMALL, **NEO}),
    "gpt_neo's classes": ("GPTNeoForSequenceClassification", {**SMALL, **NEO, "pad_token_id": 0}),
    "gptj": (
        "GPTJModel",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128, "rotary_dim": 8},
    ),
    "perceiver's classes": ("PerceiverForSequenceClassification", {**SMALL, **PERCEIVER}),
    "first token": ("XLNetForSequenceClassification", {**XLNET, "summary_type": "first"}),
}


def made(cls: str, config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    kind = getattr(transformers, cls)
    model = kind(kind.config_class(**config)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape) * 0.2)
    return model


def difference(model: Any) -> float:
    """The relative norm by which a text's result with padding differs from that of the text alone, at most."""
    worst = 0.0
    with torch.no_grad():
        for length in (60, 33, 20):  # after a short text, BigBird attends to all of a long one, too
            ids = torch.randint(5, 60, (1, length))
            padded = torch.cat([ids, torch.zeros(1, 128 - length, dtype=torch.long)], dim=1)
            alone = model(input_ids=ids, attention_mask=torch.ones_like(ids))[0][0]
            found = model(input_ids=padded, attention_mask=(torch.arange(128) < length).long()[None])[0][0]
            found = found[:length] if found.dim() == 2 else found
            worst = max(worst, float((found - alone).norm() / alone.norm()))
    return worst


def job(folder: Path, model: Any, cls: str, *, max_length: int | None = None) -> Path:
    """The spec of a job over a few texts with this model."""
    model.save_pretrained(folder / "m")
    write_tokenizer(folder / "m", longest=128)
    classes = cls.endswith("Classification")
    fields = {"fields": ["id", "logits"], "pooling": None} if classes else {"fields": ["id", "embedding"]}
    source = write_texts(folder / "t.parquet", TEXTS)
    text = {"text": {"max_length": max_length}}
    path = folder / "job.yaml"
    path.write_text(json.dumps(text_spec(folder, folder / "m", source, output=fields, input=text)))
    return path


@pytest.mark.parametrize("kind", CASES)
def test_kinds_that_padding_disturbs_are_refused(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By `validate`, and by a job."""
    cls, config, why = CASES[kind]
    model = made(cls, config)
    assert difference(model) > 1e-3
    path = job(tmp_path, model, cls)
    answer = Cli(tmp_path / "home", capsys)("validate", str(path))
    assert answer.code != 0
    assert f"model.source: found a model of type {kind}" in answer.err
    assert why in answer.err
    with pytest.raises(ModelError, match=f"model.source: found a model of type {kind}.*{why}"):
        set_up(specs.restore(json.loads(path.read_text())))


@pytest.mark.parametrize("name", FINE)
def test_their_like_that_it_does_not_disturb_run(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cls, config = FINE[name]
    model = made(cls, config)
    assert difference(model) < 1e-5
    answer = Cli(tmp_path / "home", capsys)("run", str(job(tmp_path, model, cls)))
    assert answer.code == 0, answer.err
    assert len(outputs(tmp_path / "out", "logits" if "Classification" in cls else "embedding")) == len(TEXTS)


def test_sparse_attention_is_whole_for_short_texts(tmp_path: Path) -> None:
    """The message says up to which length."""
    path = job(tmp_path, made("BigBirdModel", {**SIZES, **SPARSE}), "BigBirdModel", max_length=28)
    assert set_up(specs.restore(json.loads(path.read_text()))).limit == 28
    with pytest.raises(ModelError, match=r"up to 29 tokens, .* expected input\.text\.max_length up to 28, or model"):
        set_up(specs.restore({**json.loads(path.read_text()), "input": {
            **json.loads(path.read_text())["input"], "text": {"max_length": 29},
        }}))  # fmt: skip
