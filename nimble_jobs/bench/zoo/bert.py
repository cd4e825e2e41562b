"""BERT-base, uncased.

Devlin, Chang, Lee, Toutanova: BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding. NAACL
2019, arXiv:1810.04805. Built by transformers, which is an extra, from its default configuration.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from torch import Tensor, nn

from nimble_jobs.errors import ModelError
from nimble_jobs.models.identity import missing_package

VOCABULARY = 30_522


class Encoder(nn.Module):
    """Takes token ids alone; every position attends to every other."""

    def __init__(self, bert: Any) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        result = self.bert(input_ids=input_ids, return_dict=True)
        return {"last_hidden_state": result.last_hidden_state, "pooler_output": result.pooler_output}


def bert_base(sequence: int = 128) -> nn.Module:
    """12 layers of 768 features and 12 heads, random weights, 109.5 M parameters. Input: int64 [batch, sequence].

    Sequences may be as long as `sequence`, and 512 tokens in any case. Raises ModelError without transformers.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ModelError(missing_package("transformers"))
    import transformers

    config = transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=max(sequence, 512))
    return Encoder(transformers.BertModel(config))
