"""Replicas of vLLM on Ray Serve, which come and go as Ray says; ``ray.sh`` starts them here."""
