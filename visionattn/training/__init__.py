"""Training: configuration, data, the loop, checkpoints. Nothing below this package knows of it."""
