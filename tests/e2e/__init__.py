"""Real jobs: real processes, real signals, real files."""
