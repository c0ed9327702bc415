"""Finds the model to serve, and makes the sample model (``python -m launch.model``)."""
