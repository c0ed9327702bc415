"""One blob: its key, its header, the codec of its rows, and the way from live KV to it and back.

``chain`` names blobs by content, ``format`` is the header and checksum, ``packer`` packs and
unpacks with the codecs of a ``codec_set``; ``whole_rows`` and ``snapshot`` are what no codec
touches.
"""
