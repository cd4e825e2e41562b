"""Decodes pictures: one at a time, or many in separate processes. It also parses the headers of JPEGs.

The processes import this package alone, so that they start quickly. It knows no spec, no reader and no torch.
"""
