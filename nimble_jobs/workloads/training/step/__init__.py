"""What one step is, and a validation: the module, its loss and optimizer, the learning rate, how well it does."""
