"""Sessions between their turns: hot ones in memory, cold ones in the store.

The walk at a turn's end: ``hot_sessions`` (keep, drop when room is needed) -> ``cold_sessions``
(save and restore) -> the store that ``store_opening`` opened.
"""
