"""Seeds times invariants: the real loops and policy in a simulated world."""
