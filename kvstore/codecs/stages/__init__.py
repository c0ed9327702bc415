"""Stages of the pipelines of the product's own presets.

Before the transform: ``model_transforms``, ``gain``, ``octave_gain``. Transforms with their
quantisers: ``integer_klt``, ``integer_rows``, ``uniform``. Coders: ``planes``. ``codecs/loops`` has
their inner loops, compiled.
"""
