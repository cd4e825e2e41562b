"""A forward pass: searched, built, and loaded from the store."""
