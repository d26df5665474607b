"""Finding the newest whole checkpoint and reading it into the live tensors of any number of ranks."""
