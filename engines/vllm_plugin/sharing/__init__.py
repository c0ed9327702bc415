"""Shares vLLM's running places between tenants: chooses and preempts requests that make way."""
