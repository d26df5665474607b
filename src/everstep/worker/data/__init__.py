"""Where a training stands in its data: samplers, loaders, and the random numbers that go with them."""
