"""Copies of a host's memory tier on other hosts, moved by processes beside the training."""
