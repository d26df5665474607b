"""Real hangs over gloo under `everstep run`: the jobs, what must be said about each, and how one is played."""
