"""The caller's module: watched, bounded, and left as it was found."""
