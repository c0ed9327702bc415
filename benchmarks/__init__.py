"""Measures the product from outside: one script for each question; each prints ratios of one run.

Run as ``python benchmarks/NAME.py`` with the Python of ``.venv``. ``stacks`` starts the
measured servers, ``on_vllm`` asks the same questions of vLLM.
"""
