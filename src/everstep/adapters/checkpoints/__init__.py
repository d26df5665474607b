"""Where checkpoints lie outside of the ranks: shared memory and its pages, other hosts, stores, and their processes."""
