"""A simulated world behind the ports, in which the real policy and loops run."""
