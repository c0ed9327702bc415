"""Stages of the pipelines that the product's own presets are made of, one file each.

Before the transform: ``un_rope``, ``mean``, ``gain``, ``octave_gain``, ``metric``. Transforms with
their quantisers: ``integer_klt``, ``integer_rows``, ``prediction``, ``uniform``. Coders:
``planes``. ``compiled`` gives the inner loops of ``compiled_loops`` where numba is installed.
"""
