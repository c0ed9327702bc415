"""Kernels of the calibrated presets, in small integers.

A *unit* is a run of K or V columns that one matrix transforms into components. ``pack_fixed_rate``
and ``unpack_fixed_rate`` serve ``codecs.fixed_rate``; ``pack_loop`` and ``unpack_loop``, with
``loop_parts``, serve ``codecs.one_step``; ``rans_rows`` is the entropy coder. The other modules are
parts of these: ``engine_rows`` emits IR, ``kernel_parts`` makes it callable.
"""
