"""Modules and uses that could make a replay lie, by what the hazard is, and a judge of how each of them ends."""
