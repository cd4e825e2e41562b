"""Work in stages that run ahead of each other: threads, bounded queues, and meters that name the slowest stage."""

from nimble_jobs.pipeline.meter import Load, Meter, bottleneck
from nimble_jobs.pipeline.pool import Pool
from nimble_jobs.pipeline.stages import Sink, ahead, mapped
from nimble_jobs.pipeline.turns import short_turns

__all__ = ["Load", "Meter", "Pool", "Sink", "ahead", "bottleneck", "mapped", "short_turns"]
