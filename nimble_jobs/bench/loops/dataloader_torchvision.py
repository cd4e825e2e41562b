"""As dataloader_compiled.py, but the workers decode and resize with torchvision, which is faster than Pillow."""

import torch
from torch.utils.data import Dataset
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms.v2.functional import resize

from nimble_jobs.bench.loops import dataloader_compiled
from nimble_jobs.bench.loops.task import Task


class Pictures(Dataset[torch.Tensor]):
    def __init__(self, files, side):
        self.files, self.size = files, [side, side]

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return resize(decode_image(self.files[index], ImageReadMode.RGB), self.size)


def score(task: Task) -> float:
    """Seconds from the first to the last record."""
    return dataloader_compiled.score(task, Pictures)
