"""Measures on the model itself what a codec costs, and learns what a calibrated codec needs.

Runs inside an engine's own process, off the serving path; imported by the engines' islands only.
"""
