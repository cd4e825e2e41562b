"""Encoded pictures to pixels: one picture, many of them in processes of their own, and what a JPEG's header says.

The processes import this room alone, so that they start quickly: it knows no spec, no reader and no torch.
"""
