"""``tq3``, ``tq4`` and ``lm3``: codecs that pack every row by itself, in numpy and by kernels.

``row_codec`` is the codec, ``row_format`` the protocol of its arithmetic:
``rotated_rows`` (``rotation``, ``lloyd_max``) or ``plain_rows``; ``payload`` says where everything
lies, ``packing`` makes bytes of codes, ``backend`` chooses kernels or numpy. ``packed_array``,
``packed_layout`` and ``packed_codec`` are for engines that keep live KV in these very bytes.
"""
