"""The two loops, coordinator and agent, which meet the world through `ports` alone."""
