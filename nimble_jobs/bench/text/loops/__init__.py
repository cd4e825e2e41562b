"""Embedding loops as users write them by hand, one a file, to be compared with ours. `task.py` says what each is given.

Each is one function `embed`, in at most 40 lines, with what an experienced user would do: texts sorted by length, half
precision, the fast tokenizer, pooling in fp32 with the mask, no wait for the device within the loop. `__main__.py` runs
one of them in a process of its own.
"""
