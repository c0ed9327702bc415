"""Measures the error that a codec causes in a model, inside vLLM itself.

``calibration_engine`` opens vLLM with ``calibration_connector``. ``instrument`` lets
``engines.calibration`` use that model; ``session_instrument`` is for models with windows or
recurrent states. ``ropes`` finds out how the model rotates its keys.
"""
