"""Runs work in stages, each ahead of the next: threads, bounded queues, and meters that name the slowest stage."""

from nimble_jobs.pipeline.kept import Beside
from nimble_jobs.pipeline.meter import Load, Meter, bottleneck
from nimble_jobs.pipeline.pool import Pool
from nimble_jobs.pipeline.stages import Sink, ahead, mapped, usable_cores

__all__ = ["Beside", "Load", "Meter", "Pool", "Sink", "ahead", "bottleneck", "mapped", "usable_cores"]
