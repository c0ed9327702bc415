"""Whole systems as processes on a free port: the product (with any engine), vLLM, LMCache."""
