"""The end of a turn: new blobs, older copies that they continue, and the session's new record.

``save_queue``, ``saver`` and ``encoder`` belong to the store of tokens, which packs by itself; the
other files serve both stores.
"""
