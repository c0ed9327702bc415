"""The sample model: taken from a Python package, converted once, verified at every start."""
