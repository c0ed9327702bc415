"""Cold KV: how it is encoded (codecs), packed (format) and where it rests (tiers).

Runs inside an engine's own process, next to the blocks. numpy, numba and msgspec; no web code,
no tensor library.
"""
