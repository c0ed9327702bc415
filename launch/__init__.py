"""Turns settings into running processes. The composition root; alone in reading the environment."""
