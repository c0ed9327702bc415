"""Stages of the pipelines of the product's own presets, one file each.

Before the transform: ``un_rope``, ``mean``, ``gain``, ``octave_gain``, ``metric``. Transforms with
their quantisers: ``integer_klt``, ``integer_rows``, ``prediction``, ``uniform``. Coders:
``planes``. ``codecs/loops`` has their inner loops, compiled.
"""
