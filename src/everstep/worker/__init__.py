"""Everything that runs in the training process; the only package that imports torch."""
