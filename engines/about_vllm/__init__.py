"""Knowledge of vLLM that both sides of its process need, without importing it.

Importing vLLM takes half a minute, and only its own environment has it.
"""
