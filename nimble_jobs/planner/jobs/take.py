"""Gives a loaded model its stored schedule: captured, and checked against eager."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from nimble_jobs.engine.capture import Instance
from nimble_jobs.engine.device import able, separate_memory
from nimble_jobs.engine.observe import Observed, Watched
from nimble_jobs.engine.random_states import RandomStates
from nimble_jobs.engine.state import Snapshot
from nimble_jobs.engine.verify import ROUNDS, check_alike
from nimble_jobs.errors import CheckFailed, DeviceFault, EngineError, OutOfMemory
from nimble_jobs.graph.pause import collector_paused
from nimble_jobs.graph.writes import names_written
from nimble_jobs.models.packed import Packed
from nimble_jobs.planner.forward.calls import example_of, observe_calls
from nimble_jobs.planner.forward.restore import check_loaded, restore, source_of
from nimble_jobs.planner.jobs.loaded import Loaded, Report, Residents, build_module, keep_resident
from nimble_jobs.planner.keys.request import tolerance_of
from nimble_jobs.planner.lookup.obtain import use_stored
from nimble_jobs.planner.lookup.stored import Material, Miss, Refused, Taken, read_stored
from nimble_jobs.planner.module.carried import Carried
from nimble_jobs.planner.module.limits import numbers_for
from nimble_jobs.planner.sources.source import Variants
from nimble_jobs.schedule import Schedule
from nimble_jobs.store import Store

log = logging.getLogger(__name__)


def take_stored(
    loaded: Loaded, store: Store, residents: Residents, report: Report, *, if_it_pays: bool = False
) -> Taken[Loaded] | Miss | Refused:
    """Give a loaded model the schedule that is stored under its key. What proves unfit is quarantined. With
    `if_it_pays`, a schedule whose check takes longer than it can save this job is not loaded; `loaded.spared` says so.

    Raises OutOfMemory, DeviceFault, StoreError.
    """
    try:
        return _taken(loaded, store, residents, report, if_it_pays=if_it_pays)
    finally:
        loaded.uncalled = None  # what follows may call it


def _taken(
    loaded: Loaded, store: Store, residents: Residents, report: Report, *, if_it_pays: bool
) -> Taken[Loaded] | Miss | Refused:
    with collector_paused():
        found = read_stored(loaded.key, store)
    if not isinstance(found, Taken):
        return found
    material = found.value
    runs_eager = material.schedule.runs == "eager"
    if if_it_pays and not runs_eager:
        loaded.spared = _loses(loaded, material.schedule)
    if not runs_eager and loaded.spared is None:
        report(phase="check")

    def make() -> Loaded:
        if runs_eager:
            loaded.schedule = material.schedule
        if runs_eager or loaded.spared is not None:
            return loaded
        residents.make_room(loaded.bytes + material.schedule.peak_bytes)
        with collector_paused():
            _capture(loaded, material)
        return loaded

    return use_stored({loaded.key: material}, make, store, disagrees=_disagrees)


def _loses(loaded: Loaded, schedule: Schedule) -> str | None:
    """Why this job would lose time by loading a schedule, if it would. On a GPU a check takes milliseconds."""
    batches = loaded.request.batches
    if batches is None or separate_memory(loaded.device):
        return None
    runs_us = schedule.replay_us * schedule.in_flight  # once to capture, then as often as eager in the check
    check_s = (runs_us + ROUNDS * (schedule.eager_us + runs_us)) / 1e6
    saved_s = batches * (schedule.eager_us - schedule.replay_us) / 1e6
    if saved_s > check_s:
        return None
    full = round(batches)
    what = f"about {full:,} full {'batch' if full == 1 else 'batches'}" if full else "hardly a full batch"
    return f"in eager, as its check takes {check_s:.2g} s, and {what} would save {max(0.0, saved_s):.2g} s"


def _disagrees(error: CheckFailed) -> Refused:
    """The schedule passed its check when it was built, so its bytes or this device are in doubt. The next job builds it
    anew; this one runs in eager.
    """
    return Refused(
        reason=f"the stored schedule failed its check: {error}", fallback=f"the schedule is quarantined: {error}"
    )


def _capture(loaded: Loaded, material: Material) -> None:
    """Capture a stored schedule and check it against eager, in the cheapest way that works.

    The schedule was built by observing this code. So if its program writes none of the module's tensors, watching the
    check's own calls is enough; only if one leaves a trace is the module observed as for a build. Siblings run the same
    model, so after one of them left no traces, the others are not watched at all unless that fails.
    """
    _keep_apart(loaded, material.schedule)
    program, siblings = material.schedule.program, loaded.siblings
    example = {"x": example_of(loaded.request, loaded.module, loaded.device)}
    if not names_written(program, program.state):
        if siblings is not None and siblings.steady and _captured_unwatched(loaded, material, example):
            return
        if _captured_watched(loaded, material, example):
            if siblings is not None:
                siblings.steady = True
            return
    observed = observe_calls(loaded.module, example, loaded.device, keep_integers=False)
    _restore(loaded, material, example, observed)


def _captured_unwatched(loaded: Loaded, material: Material, example: Mapping[str, torch.Tensor]) -> bool:
    """Capture a schedule without watching what the check's calls do to the module; False if that fails."""
    snapshot, random = Snapshot(loaded.module), RandomStates(loaded.device)
    try:
        _restore(loaded, material, example, Observed(result=None, snapshot=snapshot, random=random, changing={}))
    except (OutOfMemory, DeviceFault):
        raise
    except (CheckFailed, EngineError) as e:  # the model may create something for each size of input
        log.debug("watched after all: %s", e)
        return False
    return True


def _captured_watched(loaded: Loaded, material: Material, example: Mapping[str, torch.Tensor]) -> bool:
    """Capture a schedule while the check's calls are watched. If they leave traces, or the capture fails, the module is
    put back, and the answer is False. Raises CheckFailed if it is wrong although they left none.
    """
    watched = Watched(loaded.module, loaded.device, loaded.uncalled)
    try:
        _restore(loaded, material, example, watched.observed, watched)
    except (OutOfMemory, DeviceFault):
        raise
    except CheckFailed:
        if not watched.left_traces:
            raise
    except EngineError as e:  # the program may read what the module creates in its first call
        log.debug("observed after all: %s", e)
    else:
        return True
    watched.put_back()
    return False


def _keep_apart(loaded: Loaded, schedule: Schedule) -> None:
    """Give a model its own weights if its schedule needs another layout than its siblings', who share theirs."""
    siblings = loaded.siblings
    if siblings is not None and source_of(schedule).layout != "given" and Variants(loaded.module).have_layouts:
        siblings.members.discard(loaded)
        loaded.siblings, loaded.module = None, build_module(loaded.request, loaded.device)
        loaded.carried = Carried(loaded.module)
        loaded.uncalled = loaded.carried.held


def _restore(
    loaded: Loaded,
    material: Material,
    example: Mapping[str, torch.Tensor],
    observed: Observed,
    watched: Watched | None = None,
) -> None:
    """Fill in `loaded` from the stored schedule. Raises CheckFailed, and EngineError if watched calls left traces; the
    module is then as it was.
    """

    program, below = material.schedule.program, numbers_for(loaded.module)
    # It lives as long as the loaded model, and so does what it refers to.
    alike = partial(
        check_alike, ports=program.inputs, device=loaded.device, tolerance=tolerance_of(loaded.request), below=below
    )
    later = alike if able(loaded.device).streams and not names_written(program, program.state) else None

    def check(instances: Sequence[Instance]) -> None:
        check_loaded(
            instances,
            watched or loaded.module,
            material.schedule,
            loaded.device,
            tolerance=tolerance_of(loaded.request),
            seed=secrets.randbits(32),
            below=below,
            observed=None if watched is not None else observed,  # what leaves no traces need not be put back
        )
        if watched is not None and watched.left_traces:
            raise EngineError("the model changes its own state when it is called")

    siblings, source = loaded.siblings, source_of(material.schedule)
    shared = source.folded, source.merged
    like = siblings.variants.get(shared) if siblings is not None and source.rewrites else None
    bound = build_module(loaded.request, loaded.device, like) if like is not None else None
    own = siblings is None
    try:
        try:
            restored = restore(
                loaded.module, material, example, loaded.device, check, own=own, bound=bound, alike=later
            )
        except EngineError:  # a copy of the model lacks what calls have made in it since
            if bound is None:
                raise
            restored = restore(loaded.module, material, example, loaded.device, check, own=own, alike=later)
    finally:
        observed.put_back()
    if siblings is not None and source.rewrites and isinstance(restored.module, Packed):
        siblings.variants[shared] = restored.module
    loaded.schedule, loaded.module, loaded.instances = material.schedule, restored.module, restored.instances
    loaded.observed, loaded.further = observed, restored.further


def move(loaded: Loaded, store: Store, residents: Residents, report: Report) -> Taken[Loaded] | Miss | Refused:
    """Release what the model runs now, and give it its stored schedule."""
    loaded.release()
    try:
        found = take_stored(loaded, store, residents, report)
    except OutOfMemory as e:
        return Miss(reason=str(e))
    except torch.OutOfMemoryError as e:
        return Miss(reason=f"not enough memory on {loaded.device}: {e}")
    if isinstance(found, Taken):
        keep_resident(loaded, residents)
    return found
