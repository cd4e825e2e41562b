"""Scoring loops as users write them by hand, one a file, to be compared with ours. `task.py` says what each is given.

Each is one function `score`, in at most 40 lines, with what an experienced user would do: bytes until the device,
channels last, half precision, pinned memory, no wait for the device within the loop. None has threads or streams of its
own. `__main__.py` runs one of them in a process of its own.
"""
