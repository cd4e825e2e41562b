"""Reads the files of jobs, a bounded part of each: they may be large, and may still grow."""
