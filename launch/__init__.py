"""Turns settings into running processes; the one composition root and the only reader of the environment."""
