"""Storage that hangs or fails on command, for whole processes; it knows nothing of checkpoints."""
