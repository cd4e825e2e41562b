"""What a store does, as Prometheus metrics. Everything is read when it is asked for; nothing is counted in memory.

Needs the extra `metrics`. `exposition` is the one call for whoever serves the text.
"""

from nimble_jobs.metrics.exposition import exposition
from nimble_jobs.metrics.families import FAMILIES, Family
from nimble_jobs.metrics.gpus import Gpus

__all__ = ["FAMILIES", "Family", "Gpus", "exposition"]
