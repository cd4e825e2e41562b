"""Fine-tuning: a training step in schedules or eager, data that is read ahead, checkpoints that are exact."""

from nimble_jobs.workloads.training.job import run

__all__ = ["run"]
