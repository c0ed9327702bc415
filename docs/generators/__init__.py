"""Writes the pages of ``docs/reference`` from the code that they describe."""
