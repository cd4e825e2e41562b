"""Commands that print what a batch system needs to start workers: worker script slurm, kubernetes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nimble_jobs.cli import options, output

if TYPE_CHECKING:
    from nimble_jobs.clusters import BurstWorkers

app = typer.Typer(
    name="script",
    help="Print a Slurm job array or a Kubernetes Job whose members are workers.",
    no_args_is_help=True,
)

Count = Annotated[int, typer.Option("--count", metavar="N", help="How many workers.")]
Gpus = Annotated[int, typer.Option("--gpus", metavar="N", help="GPUs of each worker; 0: it works on the CPU.")]
Cpus = Annotated[int, typer.Option("--cpus", metavar="N", help="CPU cores of each worker.")]
Memory = Annotated[str, typer.Option("--memory", metavar="SIZE", help="Host memory of each worker.")]
MaxIdle = Annotated[str, typer.Option("--max-idle", metavar="TIME", help="End a worker after this time without work.")]


@app.command()
def slurm(
    ctx: typer.Context,
    count: Count = 1,
    gpus: Gpus = 1,
    cpus: Cpus = 8,
    memory: Memory = "32GB",
    time: Annotated[
        str,
        typer.Option("--time", metavar="TIME", help="Slurm's time limit; workers end some minutes earlier."),
    ] = "4h",
    max_idle: MaxIdle = "5m",
    partition: Annotated[
        str | None, options.unset("--partition", "NAME", "Slurm partition, or several with commas.")
    ] = None,
    account: Annotated[str | None, options.unset("--account", "NAME", "Slurm account.")] = None,
    node_home: Annotated[
        str | None,
        options.unset(
            "--node-home",
            "PATH",
            "State folder on each node's own disk, with the jobs in the database that NIMBLE_JOBS_DB names. Default: "
            "this state folder, which only workers on this host may use.",
        ),
    ] = None,
    shared_cache: Annotated[
        str | None,
        options.unset(
            "--shared-cache",
            "PLACE",
            "With --node-home: folder that all nodes see, or address such as s3://BUCKET/FOLDER, where workers share "
            "the files of schedules (cache.shared). Default: each node builds its own.",
        ),
    ] = None,
) -> None:
    """Print a Slurm job array with one worker a task, for sbatch.

    A worker ends when it has been idle for too long, and some minutes before the time limit. Then its jobs reach a safe
    point and go back to the queue, and it exits with 0. Slurm's SIGTERM before the limit does the same.
    """
    from nimble_jobs.clusters import SlurmArray

    array = SlurmArray(
        workers=_workers(ctx, count=count, gpus=gpus, cpus=cpus, memory=memory, time=time, max_idle=max_idle),
        program=_program(),
        home=str(options.chosen_home(ctx).resolve()) if node_home is None else node_home,
        own_disk=node_home is not None,
        partition=partition,
        account=account,
        shared_cache=shared_cache,
    )
    output.emit(array.text().rstrip("\n"))


@app.command()
def kubernetes(
    ctx: typer.Context,
    image: Annotated[str, typer.Option("--image", metavar="IMAGE", help="Container image with nimble-jobs.")],
    claim: Annotated[
        str,
        typer.Option("--claim", metavar="NAME", help="PersistentVolumeClaim of the folder that all workers share."),
    ],
    mount: Annotated[
        str,
        typer.Option("--mount", metavar="PATH", help="Where that folder is, for workers and for those who submit."),
    ] = "/shared",
    count: Count = 1,
    gpus: Gpus = 1,
    cpus: Cpus = 8,
    memory: Memory = "32GB",
    time: Annotated[str, typer.Option("--time", metavar="TIME", help="How long a worker runs at most.")] = "4h",
    max_idle: MaxIdle = "5m",
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the Job.")] = "nimble-jobs-workers",
    namespace: Annotated[str | None, options.unset("--namespace", "NAME", "Namespace of the Job.")] = None,
    config_map: Annotated[
        str,
        typer.Option(
            "--config-map", metavar="NAME", help="ConfigMap whose key NIMBLE_JOBS_DB is the database's address."
        ),
    ] = "nimble-jobs",
    secret: Annotated[
        str, typer.Option("--secret", metavar="NAME", help="Secret whose key PGPASSWORD is the database's password.")
    ] = "nimble-jobs",  # noqa: S107  # the name of an object
    shared_cache: Annotated[
        str | None,
        options.unset(
            "--shared-cache",
            "PLACE",
            "Folder that all pods see, or address such as s3://BUCKET/FOLDER, where workers share the files of "
            "schedules (cache.shared); off: each pod builds its own. Default: nimble-jobs-schedules in --mount.",
        ),
    ] = None,
    queue: Annotated[str | None, options.unset("--queue", "NAME", "Kueue's local queue that starts the Job.")] = None,
    user_id: Annotated[
        int, typer.Option("--user-id", metavar="N", help="Numeric user and group that own what workers write.")
    ] = 10001,
) -> None:
    """Print a Kubernetes Job with one worker a pod, for kubectl.

    A worker ends when it has been idle or has run for long enough. Then, and when its node is drained, its jobs reach a
    safe point and go back to the queue, and it exits with 0. Disruptions do not count as failures.
    """
    from nimble_jobs.clusters import KubernetesJob

    job = KubernetesJob(
        workers=_workers(ctx, count=count, gpus=gpus, cpus=cpus, memory=memory, time=time, max_idle=max_idle),
        image=image,
        name=name,
        namespace=namespace,
        claim=claim,
        mount=mount,
        config_map=config_map,
        secret=secret,
        shared_cache=shared_cache,
        queue=queue,
        user=user_id,
    )
    output.emit(job.text().rstrip("\n"))


def _workers(
    ctx: typer.Context, *, count: int, gpus: int, cpus: int, memory: str, time: str, max_idle: str
) -> BurstWorkers:
    from nimble_jobs.clusters import BurstWorkers

    return BurstWorkers(
        count=count,
        gpus=gpus,
        cpus=cpus,
        memory_bytes=options.size(memory, "--memory") or 0,
        time_s=options.duration(time, "--time") or 0.0,
        max_idle_s=options.duration(max_idle, "--max-idle") or 0.0,
        grace_s=options.configured(ctx).limits.grace,
    )


def _program() -> tuple[str, ...]:
    """What runs nimble-jobs on a machine that sees this installation under the same path."""
    beside = Path(sys.executable).with_name("nimble-jobs")
    return (str(beside),) if beside.exists() else (sys.executable, "-P", "-m", "nimble_jobs.cli.main")
