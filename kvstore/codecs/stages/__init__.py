"""Stages of the pipelines of the product's own presets.

Before the transform: ``model_transforms``, ``gain``. Transform and
quantiser: ``integer_klt``. Coder: ``planes``. ``codecs/loops`` has their inner loops, compiled.
"""
