"""Sessions between their turns: hot ones in memory, cold ones in the store.

The walk at a turn's end: ``hot_cache`` (keep, drop when room is needed, save and restore) ->
``hot_sessions`` (the table) -> the store that ``store_opening`` opened.
"""
