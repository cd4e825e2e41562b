"""Small folders of text models with random weights and a tokenizer of a few words, as libraries write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

_TEXT = "the a cat dog sat ran on mat hill big small red blue house query passage : . , !"
WORDS = _TEXT.split()
TEXTS = [
    "the cat sat on the mat .",
    "A big red dog ran !",
    "house",
    "the small blue house on the big hill , the cat , the dog and the mat .",
]


def write_tokenizer(folder: Path, *, lower_case: bool = False, longest: int = 64) -> None:
    """A tokenizer of whole words, with [CLS] and [SEP] as BERT has them."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    if lower_case:
        made.normalizer = tokenizers.normalizers.Lowercase()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"unk": "[UNK]", "pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=longest, **{f"{name}_token": token for name, token in names.items()}
    ).save_pretrained(folder)


def write_bert_tokenizer(folder: Path, *, longest: int = 64) -> None:
    """The tokenizer of BERT's own class over the same words, which gives token types."""
    transformers = pytest.importorskip("transformers")
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
    transformers.BertTokenizer(vocab=vocabulary, model_max_length=longest).save_pretrained(folder)


def write_bert(folder: Path, *, cls: str = "BertModel", seed: int = 0, **config: Any) -> Path:
    """A BERT of two layers with a tokenizer, saved as transformers does."""
    transformers = pytest.importorskip("transformers")
    made = transformers.BertConfig(
        **{
            "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 32, "max_position_embeddings": 64, "initializer_range": 0.5, **config,
        }
    )  # fmt: skip
    torch.manual_seed(seed)
    getattr(transformers, cls)(made).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_sentence_model(folder: Path, base: Path, *more: Any, **transformer: Any) -> Path:
    """A folder of sentence-transformers: the model in `base`, then these modules."""
    package = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    first = modules.Transformer(str(base), **transformer)
    package.SentenceTransformer(modules=[first, *more], device="cpu").save(str(folder), create_model_card=False)
    return folder


def rewrite(path: Path, **entries: Any) -> None:
    """Replace entries of a JSON file; None removes one."""
    held = json.loads(path.read_text()) if path.exists() else {}
    held |= entries
    path.write_text(json.dumps({name: value for name, value in held.items() if value is not None}))


def seeded(module: nn.Module, seed: int = 0) -> nn.Module:
    """The module with weights that differ from each other clearly."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    return module


def write_clip(folder: Path) -> Path:
    """A CLIP for images of 16 x 16 pixels and texts of up to 16 tokens, of which 39 ends a text."""
    transformers = pytest.importorskip("transformers")
    both = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"bos_token_id": 2, "eos_token_id": 39, "pad_token_id": 0}
    made = transformers.CLIPConfig(
        text_config={**both, **ends, "vocab_size": 40, "max_position_embeddings": 16},
        vision_config={**both, "image_size": 16, "patch_size": 8},
        projection_dim=8,
        **ends,
    )
    torch.manual_seed(0)
    transformers.CLIPModel(made).save_pretrained(folder)
    return folder


def write_decoder(folder: Path) -> Path:
    """A Llama of two layers."""
    transformers = pytest.importorskip("transformers")
    made = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(made).save_pretrained(folder)
    return folder
