"""Shares vLLM's running places between tenants: who makes way, and vLLM's scheduler that asks."""
