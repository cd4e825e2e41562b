"""Decides which requests are answered at all. Each rule has a file of its own; `gate` asks them in order."""
