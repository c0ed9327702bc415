"""The models that are served, each by an engine of its own: which one is meant, which is loaded."""
