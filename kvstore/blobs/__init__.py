"""One blob: its key, its header, the codec of its rows, and conversion from and to live KV.

``chain`` names blobs by content, ``format`` is the header and checksum, ``packer`` packs and
unpacks with the codecs of a ``codec_set``. ``segments`` are rows
packed at different times, or stored without a codec; ``snapshot`` is a state, ``state_packer``
packs it.
"""
