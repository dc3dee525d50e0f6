"""A starter for PyTorch projects on Lightning."""
