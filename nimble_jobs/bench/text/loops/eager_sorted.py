"""Tokenise everything, sort by length, pad each batch to its longest text, run the model with SDPA in eager."""

import torch
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer

from nimble_jobs.bench.text.loops.task import Task


@torch.inference_mode()
def embed(task: Task, wrapped=lambda model: model, pad_to=None) -> None:
    table = task.read()
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    model = AutoModel.from_pretrained(task.model, dtype=task.dtype, attn_implementation="sdpa").to(task.device).eval()
    model = wrapped(model)
    tokens = tokenizer(table["text"].to_pylist(), truncation=True, max_length=task.max_length)["input_ids"]
    order = sorted(range(len(tokens)), key=lambda i: -len(tokens[i]))
    found = torch.empty(len(tokens), model.config.hidden_size, device=task.device)
    for start in range(0, len(order), task.batch_size):
        rows = order[start : start + task.batch_size]
        batch = {"input_ids": [tokens[i] for i in rows]}
        batch = tokenizer.pad(batch, padding="max_length" if pad_to else True, max_length=pad_to, return_tensors="pt")
        if pad_to and len(rows) < task.batch_size:  # one more shape would be compiled for the last batch
            batch = {k: torch.cat([v, v[:1].expand(task.batch_size - len(rows), -1)]) for k, v in batch.items()}
        batch = {k: v.to(task.device, non_blocking=True) for k, v in batch.items()}
        states, mask = model(**batch).last_hidden_state.float(), batch["attention_mask"].unsqueeze(-1)
        pooled = normalize((states * mask).sum(1) / mask.sum(1), dim=1)[: len(rows)]
        found[torch.tensor(rows, device=task.device)] = pooled
        task.note(batch["input_ids"].shape)
    task.write(table["id"], found.cpu().numpy())
