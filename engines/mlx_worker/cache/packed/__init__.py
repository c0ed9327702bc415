"""Live KV that stays packed while it is in use (``engine.hot_codec``).

``cache/packed_model`` gives a model these caches. ``kv_cache`` holds ``rows`` (K or V of a
session), which ``host_rows``, ``metal_packer`` or ``mx_packer`` packs. Where it is faster, a new
token attends to the packed rows without unpacking (``host_rows``, ``device_attention``).
"""
