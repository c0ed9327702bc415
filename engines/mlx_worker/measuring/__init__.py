"""Measures the served model inside its own engine, in moments in which no request needs it.

``serving_instrument.py`` belongs to the measuring thread; it hands ``held_prefix.py``'s small steps
to the owner thread through ``idle_steps.py``. ``control/measurement.py`` begins and ends it.
"""
