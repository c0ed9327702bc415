"""Reads from a model's config.json the shape of its sessions' caches and the size of its weights.

``attention.py`` and ``recurrent.py`` each know a few ways of keeping KV; ``table.py`` says which
``model_type`` is which. The result is a ``cache_shape.py``, as mlx_lm allocates it; ``weights.py``
estimates the weights.
"""
