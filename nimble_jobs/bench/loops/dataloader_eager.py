"""A DataLoader whose workers decode and resize with Pillow; the model in eager."""

import time

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from nimble_jobs.bench.loops.task import MEAN, STD, Task


class Pictures(Dataset[torch.Tensor]):
    def __init__(self, files, side):
        self.files, self.transform = files, v2.Compose([v2.Resize((side, side)), v2.PILToTensor()])

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return self.transform(Image.open(self.files[index]).convert("RGB"))


@torch.inference_mode()
def score(task: Task) -> float:
    """Seconds from the first to the last record."""
    model = task.model.to(task.device, task.dtype, memory_format=torch.channels_last)
    mean, std = (torch.tensor(v, device=task.device).view(3, 1, 1) * 255 for v in (MEAN, STD))
    model(torch.zeros(task.batch_size, 3, task.side, task.side, device=task.device, dtype=task.dtype))
    data, pin, found = Pictures(task.files, task.side), task.device == "cuda", []
    batches = iter(DataLoader(data, task.batch_size, num_workers=task.workers, pin_memory=pin))
    begin = time.perf_counter()
    for x in batches:
        x = x.to(task.device, non_blocking=True).to(memory_format=torch.channels_last)
        found.append(model(((x - mean) / std).to(task.dtype)).float().softmax(1).max(1))
    probability, top1 = (torch.cat(parts).cpu().numpy() for parts in zip(*found, strict=True))
    pq.write_table(pa.table({"id": task.files, "top1": top1, "probability": probability}), task.out)
    return time.perf_counter() - begin
