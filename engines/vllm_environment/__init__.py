"""Knowledge of vLLM that the gateway and vLLM's own processes both need; never imports vLLM.

Importing vLLM takes half a minute, and only vLLM's own environment has it.
"""
