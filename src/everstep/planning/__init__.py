"""Arithmetic for large runs: how often they fail, what is left of their time, what they need."""
