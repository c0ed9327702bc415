"""Codecs, which pack runs of KV into payloads and back, and are chosen by name.

A new preset is a row of ``names``, and a function or constant that makes it in the room of its
kind. ``presets`` opens a codec by its name and ``calibrated`` a learned one with its ``profile``;
neither knows how any of them works.

    rows           pack each row by itself: ``tq3``, ``tq4``, ``lm3``
    attention      products with packed rows of those, and weighted sums, as they are
    fixed_rate     learned, all chunks of one size: ``dense3``
    one_step       learned and entropy-coded (``entropy``): ``balanced``, ``max``, ``safe``
    literature     methods of papers, for comparison
    stages, stacks what the learned ones are made of, and the order it runs in
    learning       what a profile is learned from
    kernels        the same bytes, compiled
"""
