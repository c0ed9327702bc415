"""Kernels of the row codecs: pack and unpack ``tq3`` and ``tq4`` at memory speed."""
