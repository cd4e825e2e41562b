"""Opens the place for a job's unpublished output: a folder, or an object store."""

from __future__ import annotations

from typing import Any

from nimble_jobs.data.member_staging import MemberStaging
from nimble_jobs.data.object_staging import MemberObjects, ObjectStaging
from nimble_jobs.data.staging import Staging
from nimble_jobs.objects import Through
from nimble_jobs.spec.model import OutputSpec

AnyStaging = Staging | ObjectStaging
AnyMember = MemberStaging | MemberObjects


def stage(
    output: OutputSpec, job_id: str, attempt: int, *, through: Through, successor: str | None = None, **options: Any
) -> AnyStaging:
    """What one attempt writes. `through` repeats requests to an object store; other options are those of `Staging`."""
    if output.address is not None:
        return ObjectStaging(output, job_id, attempt, through=through, **options)
    return Staging(output, job_id, attempt, successor=successor, **options)


def stage_member(
    output: OutputSpec, job_id: str, attempt: int, worker: str, *, through: Through, **options: Any
) -> AnyMember:
    """What one member of a job writes. `through` as for `stage`; options are those of `MemberStaging`."""
    if output.address is not None:
        return MemberObjects(output, job_id, attempt, through=through, **options)
    return MemberStaging(output, job_id, attempt, worker, **options)
