"""Replicas of vLLM on Ray Serve, with our connector; runs inside Ray's processes."""
