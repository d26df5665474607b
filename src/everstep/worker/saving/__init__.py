"""Keeping the state of a training: to memory while it goes on, from there to disk, or to disk by the ranks."""
