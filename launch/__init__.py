"""Turns settings into running processes: the composition root, the only reader of the environment."""
