"""Workers read files; torchvision decodes whole batches on the GPU, resizes them there, and the model is compiled."""

import time

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader
from torchvision.io import ImageReadMode, decode_jpeg, read_file
from torchvision.transforms.v2.functional import resize

from nimble_jobs.bench.loops.task import MEAN, STD, Task


def together(files):
    data = [read_file(file) for file in files]  # one tensor a batch crosses from a worker, not one a file
    return torch.cat(data), [len(each) for each in data]


@torch.no_grad()
def score(task: Task) -> float:
    """Seconds from the first to the last record."""
    model = task.model.to(task.device, task.dtype, memory_format=torch.channels_last)
    mean, std = (torch.tensor(v, device=task.device).view(3, 1, 1) * 255 for v in (MEAN, STD))

    @torch.compile(mode=task.mode, dynamic=False)
    def predict(x):
        x = ((x - mean) / std).to(task.dtype, memory_format=torch.channels_last)
        return model(x).float().softmax(1).max(1)

    blank, size = torch.zeros(task.batch_size, 3, task.side, task.side, device=task.device).byte(), [task.side] * 2
    for _ in range(3):
        decode_jpeg([read_file(task.files[0])], device=task.device)
        predict(blank)
    batches = iter(DataLoader(task.files, task.batch_size, num_workers=task.workers, collate_fn=together))
    begin, found, decoding = time.perf_counter(), [], torch.cuda.Stream(task.device)
    for data, sizes in batches:
        with torch.cuda.stream(decoding):  # decode_jpeg would write into memory that kernels of this stream still read
            pictures = decode_jpeg(list(data.split(sizes)), ImageReadMode.RGB, device=task.device)
        for each in pictures:
            each.record_stream(torch.cuda.current_stream(task.device))
        alike = len({each.shape for each in pictures}) == 1
        x = resize(torch.stack(pictures), size) if alike else torch.stack([resize(each, size) for each in pictures])
        found.append([y.clone() for y in predict(torch.cat([x, blank[len(x) :]]))])
    probability, top1 = (torch.cat(parts)[: len(task.files)].cpu().numpy() for parts in zip(*found, strict=True))
    out = {"id": task.files, "top1": top1, "probability": probability}
    pq.write_table(pa.table(out), task.out)
    return time.perf_counter() - begin
