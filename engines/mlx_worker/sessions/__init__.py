"""Sessions between their turns: hot ones in memory, cold ones in the store.

The walk at a turn's end: ``hot_cache`` (keep, and drop when room is needed) -> ``hot_sessions``
(the table) -> ``cold_sessions`` (save into the store that ``store_opening`` opened).
"""
