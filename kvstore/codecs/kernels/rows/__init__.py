"""Kernels of rows: pack and unpack ``tq1`` to ``tq8``, and attend to packed rows as they are."""
