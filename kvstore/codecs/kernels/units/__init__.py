"""Kernels of the calibrated presets, in small integers.

A *unit* is a run of K or V columns that one matrix transforms into components. ``pack_fixed_rate``
and ``unpack_fixed_rate`` serve ``codecs.fixed_rate``; ``pack_one_step`` and ``unpack_one_step``,
with ``one_step_levels``, serve ``codecs.one_step``; ``word_products`` serves the pipelines of both.
The other modules are parts of these: ``engine_rows`` emits IR, ``kernel_parts`` makes it callable.
"""
