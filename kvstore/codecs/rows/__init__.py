"""``tq3``, ``tq4`` and ``lm3``: codecs that pack every row by itself, in numpy and by kernels.

``row_codec`` is the codec, ``row_format`` the protocol of its arithmetic:
``rotated_rows`` (``rotation``, ``lloyd_max``), or ``PlainRows``; ``payload`` computes where each
part lies, ``backend`` chooses kernels or numpy. ``packed_layout`` and ``packed_codec`` are for
engines whose live KV is packed in the same bytes.
"""
