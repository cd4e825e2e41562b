"""Reads records, writes shards, and publishes folders whole. Formats are imported when first used."""

from nimble_jobs.data.member_staging import MemberStaging, listing_for_member
from nimble_jobs.data.opening import open_reader
from nimble_jobs.data.reader import Reader
from nimble_jobs.data.records import BadRecord, Batch, Signature
from nimble_jobs.data.shards import Shard
from nimble_jobs.data.source import Wanted
from nimble_jobs.data.stage import AnyMember, AnyStaging, stage, stage_member
from nimble_jobs.data.staging import Staging, check_writable

__all__ = [
    "AnyMember",
    "AnyStaging",
    "BadRecord",
    "Batch",
    "MemberStaging",
    "Reader",
    "Shard",
    "Signature",
    "Staging",
    "Wanted",
    "check_writable",
    "listing_for_member",
    "open_reader",
    "stage",
    "stage_member",
]
