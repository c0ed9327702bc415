"""Defects to plant on purpose, one for each row of ``docs/faults.md``: its test must notice it."""
