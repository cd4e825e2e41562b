"""A DataLoader whose workers decode and resize with Pillow; the model, with what comes before and after, compiled."""

import time

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader

from nimble_jobs.bench.loops.dataloader_eager import Pictures
from nimble_jobs.bench.loops.task import MEAN, STD, Task


@torch.no_grad()
def score(task: Task, pictures=Pictures) -> float:
    """Seconds from the first to the last record."""
    model = task.model.to(task.device, task.dtype, memory_format=torch.channels_last)
    mean, std = (torch.tensor(v, device=task.device).view(3, 1, 1) * 255 for v in (MEAN, STD))

    @torch.compile(mode=task.mode, dynamic=False)
    def predict(x):
        x = ((x - mean) / std).to(task.dtype, memory_format=torch.channels_last)
        return model(x).float().softmax(1).max(1)

    blank = torch.zeros(task.batch_size, 3, task.side, task.side, dtype=torch.uint8, device=task.device)
    for _ in range(3):
        predict(blank)
    data, pin, found = pictures(task.files, task.side), task.device == "cuda", []
    batches = iter(DataLoader(data, task.batch_size, num_workers=task.workers, pin_memory=pin))
    begin = time.perf_counter()
    for x in batches:
        short = task.batch_size - len(x)  # a smaller last batch would be compiled again
        x = x.to(task.device, non_blocking=True)
        found.append([y.clone() for y in predict(torch.cat([x, blank[:short]]) if short else x)])
    probability, top1 = (torch.cat(parts)[: len(task.files)].cpu().numpy() for parts in zip(*found, strict=True))
    pq.write_table(pa.table({"id": task.files, "top1": top1, "probability": probability}), task.out)
    return time.perf_counter() - begin
