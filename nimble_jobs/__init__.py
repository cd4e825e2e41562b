"""nimble-jobs: ahead-of-time GPU task schedules, kept in a store and replayed by a batch job runner."""

__version__ = "0.1.0"
