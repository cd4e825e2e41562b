"""Every private PyTorch name that the package uses, apart from Inductor's, in one place."""
