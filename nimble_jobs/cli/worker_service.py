"""Commands that run a worker as a systemd service: worker service install, uninstall, status."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nimble_jobs.cli import options, output
from nimble_jobs.errors import NimbleError, NotFound, UsageError

if TYPE_CHECKING:
    from nimble_jobs.service import Manager, Service

app = typer.Typer(
    name="service",
    help="Run a worker under systemd, which starts it with your session and keeps it running.",
    no_args_is_help=True,
)


@app.command()
def install(
    ctx: typer.Context,
    device: Annotated[
        str | None, typer.Option("--device", help="auto, cpu, cuda or cuda:N; default: device in config.yaml.")
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option("--devices", metavar="LIST", help="all, or a list such as cuda:0,cuda:2: a process for each."),
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option("--gpu-memory", metavar="SIZE", help="Device memory for resident models, such as 20GB."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the unit file; write and start nothing.")] = False,
) -> None:
    """Write a systemd user unit for this state folder's worker, start it, and start it with each session.

    Each state folder has one unit. Installing again replaces the file. Without systemd the command prints how to run
    the worker. If NIMBLE_JOBS_DB holds a password, it goes into a file of its own beside the unit.
    """
    from nimble_jobs.service import Manager

    service = _service(ctx, device, devices, gpu_memory)
    manager = Manager()
    files = service.files()
    if dry_run:
        for name, text in service.files(hidden=True).items():
            output.note(f"{manager.path(name)}:")
            output.emit(text.rstrip("\n"))
        return
    why = manager.missing()
    if why is not None:
        _without_systemd(manager, service, why)
        raise typer.Exit(1)
    before = manager.read(service.name)
    # The unit is the last one: without the file that it names, it would not start.
    changed = [_put(manager, name, files.get(name)) for name in (service.secrets_name, service.name)]
    manager.enable(service.name)
    output.emit(service.name)
    done = "written" if before is None else "replaced" if any(changed) else "unchanged"
    output.note(f"{manager.path(service.name)}: {done}")
    if service.secrets_name in files:
        output.note(f"{manager.path(service.secrets_name)}: holds the database's password; only you can read it")
    if done == "replaced":
        output.note(
            f"the running worker keeps the old settings; restart it with: systemctl --user restart {service.name}"
        )
    if manager.lingers() is not True:
        output.note("the worker stops when you log out, unless you run: loginctl enable-linger")
    output.note(f"see its log with: journalctl --user -u {service.name}")


@app.command()
def uninstall(
    ctx: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be removed; change nothing.")] = False,
    yes: options.Yes = False,
) -> None:
    """Stop the worker of this state folder's unit and remove the unit. The worker puts its job back into the queue."""
    from nimble_jobs.service import Manager

    service = _service(ctx, None, None, None)
    manager = Manager()
    path = manager.path(service.name)
    if manager.read(service.name) is None:
        raise NotFound(f"{path}: no service is installed for the state folder {service.home}")
    names = [name for name in (service.name, service.secrets_name) if manager.path(name).exists()]
    paths = " and ".join(str(manager.path(name)) for name in names)
    if dry_run:
        output.note(f"would stop {service.name} and remove {paths}")
        return
    if not options.confirmed(f"Stop {service.name} and remove {paths}?", yes=yes):
        return
    why = manager.missing()
    if why is None:
        manager.disable(service.name)
    else:
        output.note(f"{why}; only files are removed, and a running worker continues")
    # The unit is the last one, so that after a failure the command can be repeated.
    for name in reversed(names):
        _put(manager, name, None)
    if why is None:
        manager.forget(service.name)
    output.note(f"removed {paths}")


@app.command()
def status(ctx: typer.Context, json: options.Json = False) -> None:
    """Say whether this state folder's service is installed and running, as systemd sees it."""
    from nimble_jobs.service import Manager

    service = _service(ctx, None, None, None)
    manager = Manager()
    path, text = manager.path(service.name), manager.read(service.name)
    if text is None:
        raise NotFound(f"{path}: no service is installed for the state folder {service.home}")
    why = manager.missing()
    state = None if why is not None else manager.state(service.name)
    row: dict[str, Any] = {
        "unit": service.name,
        "file": str(path),
        "home": str(service.home),
        "systemd": why is None,
        "load": state and state.load,
        "active": state and state.active,
        "sub": state and state.sub,
        "enabled": state and state.enabled,
        "pid": state and state.pid,
        "result": state and state.result,
        "exit_status": state and state.exit_status,
        "restarts": state and state.restarts,
        "since": state and state.since,
        "worker": _worker(ctx, state.pid) if state and state.pid else None,
        "interpreter": _interpreter(text),
    }
    if json:
        output.emit_json(row)
        return
    output.emit(service.name)
    output.emit(f"  file     {path}")
    if state is None:
        output.emit(f"  state    unknown: {why}")
        return
    output.emit(f"  state    {state.active} ({state.sub})" + (f" since {state.since}" if state.since else ""))
    output.emit(f"  starts   {'with your session' if state.enabled else 'only by hand'}")
    if state.pid:
        output.emit(f"  process  {state.pid}" + (f", worker {row['worker']}" if row["worker"] else ""))
    if state.result != "success":
        output.emit(f"  failed   {state.result}, exit code {state.exit_status}, restarted {state.restarts} times")
        output.note(f"see why with: journalctl --user -u {service.name}")
    interpreter = row["interpreter"]
    if interpreter is not None and not Path(interpreter).exists():
        output.note(f"the unit's Python {interpreter} is gone; install the service again")


def _service(ctx: typer.Context, device: str | None, devices: str | None, gpu_memory: str | None) -> Service:
    from nimble_jobs.service import Service, environment_of
    from nimble_jobs.worker.devices import ALL, devices_of

    if device is not None and devices is not None:
        raise UsageError("--device and --devices: found both; expected one of them")
    if devices is not None and devices != ALL:  # counted at each start
        devices = ",".join(devices_of(devices))
    settings = options.configured(ctx, device=device, gpu_memory=gpu_memory)
    return Service(
        home=options.home(ctx),
        grace_s=settings.limits.grace,
        device=None if device is None else settings.device,
        devices=devices,
        gpu_memory_bytes=None if gpu_memory is None else settings.gpu_memory,
        environment=environment_of(os.environ),
    )


def _without_systemd(manager: Manager, service: Service, why: str) -> None:
    output.note(f"no service was installed: {why}")
    if "no systemctl" not in why:
        output.note(
            "log in as this user in a session of its own (not with su or sudo) and install again, or do this instead:"
        )
    output.emit(service.by_hand().rstrip("\n"))


def _put(manager: Manager, name: str, text: str | None) -> bool:
    """Write the file, or remove it if there is no text. False if nothing changes. Raises NimbleError."""
    try:
        return manager.remove(name) if text is None else manager.write(name, text)
    except OSError as e:
        raise NimbleError(f"{manager.path(name)}: {e.strerror}") from e


def _worker(ctx: typer.Context, pid: int) -> str | None:

    with options.store(ctx) as store:
        live = store.workers.live("worker")
        return next((info.id for info in live if info.pid == pid and store.workers.here(info)), None)


def _interpreter(text: str) -> str | None:
    """The first word of a unit's command, if it is plain enough to be read back."""
    for line in text.splitlines():
        if line.startswith('ExecStart=:"'):
            word = line.removeprefix('ExecStart=:"').partition('"')[0]
            return None if "\\" in word else word.replace("%%", "%")
    return None
