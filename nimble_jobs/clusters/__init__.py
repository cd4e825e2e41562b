"""Workers that a batch system starts: a Slurm job array and a Kubernetes Job as text. Never loads torch."""

from nimble_jobs.clusters.kubernetes import KubernetesJob
from nimble_jobs.clusters.slurm import SlurmArray
from nimble_jobs.clusters.workers import BurstWorkers

__all__ = ["BurstWorkers", "KubernetesJob", "SlurmArray"]
