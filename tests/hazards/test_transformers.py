"""Models of transformers, from small configurations, with masks other than the example's: recorded, equal to eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nimble_jobs import Nimble

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

BATCH, LENGTH, WORDS = 3, 8, 50
FIRST = ("all", "right", "left")  # masks by which schedules are prepared
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "vocab_size": WORDS,
}


def ids() -> torch.Tensor:
    return torch.randint(3, WORDS, (BATCH, LENGTH))


def masks() -> dict[str, torch.Tensor]:
    """Of three shapes, and one more that mixes them."""
    at, keep = torch.arange(LENGTH), torch.tensor([[8], [5], [3]])
    return {
        "all": torch.ones(BATCH, LENGTH, dtype=torch.int64),
        "right": (at < keep).long(),
        "left": (at >= LENGTH - keep).long(),
        "mixed": torch.stack([at >= 0, at < 4, at >= 6]).long(),
    }


def text(cls: str, **config: Any) -> nn.Module:
    made = getattr(transformers, f"{cls}Config")(**{**SMALL, **config})
    return getattr(transformers, f"{cls}Model")(made)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, use_cache=False
    )
    return transformers.T5EncoderModel(config)


TEXT: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: text("Bert"),
    "distilbert": lambda: transformers.DistilBertModel(
        transformers.DistilBertConfig(
            vocab_size=WORDS, dim=16, n_layers=2, n_heads=2, hidden_dim=32, max_position_embeddings=32
        )
    ),
    "roberta": lambda: text("Roberta", pad_token_id=1),
    "xlm-roberta": lambda: text("XLMRoberta", pad_token_id=1),
    "mpnet": lambda: text("MPNet", pad_token_id=1),
    "electra": lambda: text("Electra", embedding_size=8),
    "albert": lambda: text("Albert", embedding_size=8),
    "deberta": lambda: text("Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "deberta-v2": lambda: text("DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=4),
    "modernbert": lambda: text(
        "ModernBert",
        local_attention=4,
        global_attn_every_n_layers=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    ),
    "siglip-text": lambda: transformers.SiglipTextModel(
        transformers.SiglipTextConfig(**SMALL, bos_token_id=1, eos_token_id=2, pad_token_id=1)
    ),
    "t5": t5,
    "llama": lambda: text("Llama", use_cache=False, num_key_value_heads=1),
    "gpt2": lambda: transformers.GPT2Model(
        transformers.GPT2Config(
            vocab_size=WORDS,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=32,
            use_cache=False,
            bos_token_id=1,
            eos_token_id=2,
        )
    ),
}


def clip() -> nn.Module:
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.CLIPConfig(
        text_config={**small, "vocab_size": WORDS, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2},
        vision_config={**small, "image_size": 16, "patch_size": 8},
        projection_dim=16,
    )
    return transformers.CLIPModel(config)


def siglip() -> nn.Module:
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    text_config = {**small, "vocab_size": WORDS, "max_position_embeddings": 32, "pad_token_id": 1}
    vision_config = {**small, "image_size": 16, "patch_size": 8}
    return transformers.SiglipModel(transformers.SiglipConfig(text_config=text_config, vision_config=vision_config))


def vit() -> nn.Module:
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return transformers.ViTModel(transformers.ViTConfig(**small, image_size=16, patch_size=8))


class WhisperEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = transformers.WhisperConfig(
            vocab_size=WORDS, d_model=16, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=32,
            decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=16,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        )  # fmt: skip
        self.encoder = transformers.WhisperModel(config).encoder

    def forward(self, features: torch.Tensor, mask: torch.Tensor) -> Any:
        return self.encoder(features, attention_mask=mask)


def compare(found: Any, expected: Any) -> None:
    """Fails unless both are outputs of one type with equal tensors under the same names."""
    assert type(found) is type(expected)
    assert list(found) == list(expected)
    for name in expected:
        if isinstance(expected[name], torch.Tensor):
            torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)
        elif hasattr(expected[name], "keys"):
            compare(found[name], expected[name])


def recorded(module: nn.Module, example: Any) -> Nimble:
    nimble = Nimble(module.eval())
    nimble.prepare(example, fuse="off", streams=1, eager="reference")
    assert nimble.fallback is None
    assert nimble.schedule is not None
    return nimble


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("name", TEXT)
def test_text_with_masks(name: str, first: str, request: pytest.FixtureRequest) -> None:
    """Prepared with one shape of mask, it is right for all others: nothing of the example's mask is in the schedule.

    Without `--all`, each model is prepared with one of the shapes, and each shape is that of several models.
    """
    turn = (list(TEXT).index(name) + FIRST.index(first)) % len(FIRST)
    if turn and not request.config.getoption("--all"):
        pytest.skip("another shape of mask with the same model; with --all")
    torch.manual_seed(0)
    module = TEXT[name]()
    nimble = recorded(module, {"input_ids": ids(), "attention_mask": masks()[first]})
    for mask in masks().values():
        given = {"input_ids": ids(), "attention_mask": mask}
        with torch.no_grad():
            compare(nimble(**given), module(**given))


@pytest.mark.parametrize("name", TEXT)
def test_text_without_a_mask(name: str) -> None:
    """All positions are attended to."""
    torch.manual_seed(0)
    module = TEXT[name]()
    nimble = recorded(module, {"input_ids": ids()})
    for _ in range(3):
        given = ids()
        with torch.no_grad():
            compare(nimble(input_ids=given), module(input_ids=given))


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("made", [clip, siglip])
def test_text_and_images_with_masks(made: Callable[[], nn.Module], first: str) -> None:
    """Text with a mask, and images; CLIP finds the end of a text by its token."""
    torch.manual_seed(0)
    module = made()

    def given(mask: torch.Tensor) -> dict[str, torch.Tensor]:
        text = ids()
        text[torch.arange(BATCH), torch.randint(1, LENGTH, (BATCH,))] = 2
        return {"input_ids": text, "pixel_values": torch.randn(2, 3, 16, 16), "attention_mask": mask}

    nimble = recorded(module, given(masks()[first]))
    for mask in masks().values():
        batch = given(mask)
        with torch.no_grad():
            compare(nimble(**batch), module(**batch))


def test_vit() -> None:
    """Images of other scales than the example's."""
    torch.manual_seed(0)
    module = vit()
    nimble = recorded(module, {"pixel_values": torch.randn(2, 3, 16, 16)})
    for scale in (1.0, 1e-3, -50.0):
        made = torch.randn(2, 3, 16, 16) * scale
        with torch.no_grad():
            compare(nimble(pixel_values=made), module(pixel_values=made))


@pytest.mark.parametrize("first", FIRST)
def test_whisper_encoder_with_masks(first: str) -> None:
    """Mel features with a mask of frames."""
    torch.manual_seed(0)
    module = WhisperEncoder().eval()
    shapes = {n: m.repeat(1, 4) for n, m in masks().items()}
    nimble = recorded(module, (torch.randn(BATCH, 8, 32), shapes[first]))
    for mask in shapes.values():
        made = torch.randn(BATCH, 8, 32)
        with torch.no_grad():
            compare(nimble(made, mask), module(made, mask))
