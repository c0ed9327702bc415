"""One blob: its key, its header, the codec of its rows, and conversion from and to live KV.

``chain`` names blobs by content, ``format`` is the header and checksum, ``packer`` packs and
unpacks with a store's codecs. ``state_tree`` is a state as an engine hands it over,
``state_packer`` takes windows and matrices out of it.
"""
