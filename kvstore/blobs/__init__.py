"""One blob: its key, its header, the codec of its rows, and conversion from and to live KV.

``chain`` names blobs by content, ``format`` writes and checks header and checksum, and ``packer``
packs and unpacks KV with a store's codecs. ``state_tree`` defines a state as an engine hands it
over, and ``state_packer`` takes its windows out and packs its matrices.
"""
