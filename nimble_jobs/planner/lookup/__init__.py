"""What the store holds under a key, and who builds what it does not hold."""
