"""Modules and uses that could make a replay lie."""
