"""Fine-tuning: a training step in schedules or in eager, data that is read ahead, and checkpoints that are exact.

Data flows one way, through one folder after the other; each sees only those before it:

    batches/   read records in their order, check them, and put them on the device as batches
    step/      what one step is; its schedules, learning rate and loss; validations between steps
    gauge/     gather the figures of each step without waiting for the device, and write them down
    keep/      copy the state to checkpoints, and go on from one
    loop.py    walks each batch through these stages
    session.py, job.py    the phases around it: open and claim, prepare, begin, train, publish
    ahead.py   the schedules alone, without a job
"""

from nimble_jobs.workloads.training.job import run

__all__ = ["run"]
