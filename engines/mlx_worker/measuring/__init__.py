"""Measures the served model between users' requests, in small steps on the owner thread."""
