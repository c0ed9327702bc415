"""Sessions between their turns: hot ones in memory, cold ones in the store.

At a turn's end, ``hot_sessions`` keeps the KV, and drops it later when room is needed;
``cold_sessions`` saves and restores it, in the store that ``store_opening`` has opened.
"""
