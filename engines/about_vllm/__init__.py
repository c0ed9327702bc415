"""What both sides of vLLM's process must know of it, without importing it.

Importing vLLM takes half a minute, and only its own environment has it.
"""
