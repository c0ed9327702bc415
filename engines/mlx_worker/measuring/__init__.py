"""Measures the served model between users' requests, in small steps of the owner thread."""
