"""everstep keeps large synchronous PyTorch training productive; this file knows the version and nothing else."""

__version__ = "0.1.0"
