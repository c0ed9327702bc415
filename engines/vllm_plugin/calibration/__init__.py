"""Measures inside vLLM itself what a codec costs a model.

``instrument`` is ``engines.calibration``'s view of the model (``session_instrument``: of one with
windows or recurrent states), run by ``calibration_engine`` with ``calibration_connector``;
``ropes`` finds how it turns keys.
"""
