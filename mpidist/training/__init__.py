"""Parts of a training loop beside the strategy: losses, optimizers, metrics, random numbers."""
