"""Kernels of the calibrated presets, in small integers.

A *unit* is a run of K or V columns that one matrix transforms into components. ``pack_fixed_rate``
and ``unpack_fixed_rate`` serve ``codecs.fixed_rate``; ``unpack_one_step``, with
``one_step_levels`` and ``one_step_prediction``, serves ``codecs.one_step``. The other modules are
parts of these: ``rows_in``, ``rows_out`` and ``codes`` emit IR, ``host_intrinsics`` makes it
callable.
"""
