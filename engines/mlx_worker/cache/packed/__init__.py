"""Live KV that stays packed while it is in use (``engine.hot_codec``).

The walk: ``model`` (gives a model these caches) -> ``kv_cache`` -> ``side`` (K or V of a session)
-> ``row_packer`` (the seam; ``packer_choice`` takes the host's, Metal's or mlx's).
"""
