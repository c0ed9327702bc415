"""Model families: from config.json to the shape of a session's cache, as mlx_lm allocates it.

``config.py`` reads config.json; ``attention.py``, ``windows.py``, ``recurrent.py`` and
``latents.py`` each know a few ways of keeping KV; ``table.py`` says which ``model_type`` is which.
"""
