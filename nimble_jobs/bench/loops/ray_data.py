"""Ray Data: tasks decode and resize with Pillow, one actor on the device scores batches with the compiled model."""

import io
import time
from pathlib import Path

import numpy as np
import ray
import torch
from PIL import Image

from nimble_jobs.bench.loops.task import MEAN, STD, Task


class Predictor:
    def __init__(self, task):
        model = task.model.to(task.device, task.dtype, memory_format=torch.channels_last)
        mean, std = (torch.tensor(v, device=task.device) * 255 for v in (MEAN, STD))
        self.task, self.blank = task, torch.zeros(task.batch_size, task.side, task.side, 3, dtype=torch.uint8)
        to_input = lambda x: ((x - mean) / std).to(task.dtype).permute(0, 3, 1, 2)  # noqa: E731  # channels last
        predict = lambda x: model(to_input(x)).float().softmax(1).max(1)  # noqa: E731
        self.predict = torch.compile(predict, mode=task.mode, dynamic=False)
        for _ in range(3):
            self({"id": [""], "image": self.blank[:1]})
        Path(f"{task.out}.ready").write_text(str(time.time()))

    @torch.no_grad()
    def __call__(self, batch):
        x, count = torch.as_tensor(batch["image"]), len(batch["id"])
        probability, top1 = self.predict(torch.cat([x, self.blank[count:]]).to(self.task.device))
        return {"id": batch["id"], "top1": top1[:count].cpu().numpy(), "probability": probability[:count].cpu().numpy()}


def decode(row, side, ready):
    while not ready.exists():  # or much would be decoded before the clock starts
        time.sleep(0.01)
    image = Image.open(io.BytesIO(row["bytes"])).convert("RGB").resize((side, side), Image.BILINEAR)
    return {"id": row["path"], "image": np.asarray(image)}


def score(task: Task) -> float:
    """Seconds from when the actor is ready."""
    gpus, ready = int(task.device == "cuda"), Path(f"{task.out}.ready")
    ray.shutdown()
    ray.init(num_cpus=task.workers, num_gpus=gpus, include_dashboard=False, log_to_driver=False)
    data = ray.data.read_binary_files(task.files, include_paths=True)
    actor = {"num_gpus": gpus, "num_cpus": 0, "compute": ray.data.ActorPoolStrategy(size=1)}  # with a CPU, it decodes
    data = data.map(decode, fn_kwargs={"side": task.side, "ready": ready})
    data.map_batches(Predictor, fn_constructor_args=[task], batch_size=task.batch_size, **actor).write_parquet(task.out)
    return time.time() - float(ready.read_text())
