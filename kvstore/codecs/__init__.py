"""Codecs, which pack runs of KV into payloads and unpack them, and are opened by name.

``engines.calibration.gate`` chooses the codec that serves a model.

A new preset needs a row in ``catalogue``, and a function or constant that makes it, in the folder
of its kind. ``presets`` opens a codec by its name; ``calibrated`` opens a learned one with its
``profile``. Neither knows how any codec works.

    rows           pack each row by itself: ``tq3``, ``tq4``, ``lm3``; attend to packed rows
    fixed_rate     learned, all chunks of one size: ``dense3``
    one_step       learned and entropy-coded (``entropy``): ``balanced``, ``max``, ``safe``
    literature     methods of papers, for comparison
    stages, stacks the stages of learned codecs, and the order in which they run
    loops          the inner loops of stages, compiled
    learning       the statistics from which a profile is learned
    kernels        whole codecs, compiled; they give the same bytes
"""
