"""What a job is given: a model that is ready to run, and builds beside and ahead of jobs."""
