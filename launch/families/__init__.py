"""Computes the shape of a model's caches and the size of its weights from its config.json.

``attention.py`` and ``recurrent.py`` have a function for each kind of cache, and ``table.py`` maps
each ``model_type`` to one of them. The result is a ``CacheShape``, as the engine allocates caches;
``weights.py`` estimates the weights.
"""
