"""Copies of what is on disk in an object store, made by a process beside the training."""
