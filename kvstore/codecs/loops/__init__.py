"""Inner loops of stages and stacks, compiled by numba where it is installed."""
