"""A training step: recorded whole, searched, checked, loaded from the store, and its validations."""
