"""Live KV that stays packed while it is in use (``engine.hot_codec``).

``cache/packed_model`` gives a model these caches. The walk: ``kv_cache`` -> ``side`` (K or V of a
session) -> ``row_packer`` (the seam; ``packer_choice`` takes the host's, Metal's or mlx's). A new
token is attended to packed rows as they are (``attention``, ``host_attention``,
``device_attention``), where that is faster (``attention_choice``).
"""
