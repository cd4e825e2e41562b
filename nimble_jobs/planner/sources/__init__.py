"""The ways to turn a module into tasks: whose kernels, over which variant of its weights."""
