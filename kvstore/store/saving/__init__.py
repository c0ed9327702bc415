"""The saves of a store that packs by itself: their queue, their thread, and what they pack."""
