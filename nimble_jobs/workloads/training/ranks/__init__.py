"""Several processes that train one model together, each on a device of its own: the ranks of a job."""
