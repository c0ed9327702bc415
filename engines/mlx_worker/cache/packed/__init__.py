"""Live KV that stays packed while it is in use (``engine.hot_codec``).

``cache/packed_model`` gives a model these caches. The walk: ``kv_cache`` -> ``rows`` (K or V of a
session, and what packs it: ``host_rows``, ``metal_packer`` or ``mx_packer``). A new token is
attended to packed rows as they are (``host_rows``, ``device_attention``), where that is faster.
"""
