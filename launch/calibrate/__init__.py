"""Has a model measured by its engine: ``thermocline calibrate``, and once at vLLM's first start.

``orders.py`` says what to measure, ``program.py`` runs the engine's program in the foreground and
``background_run.py`` beside a server; ``profile_notes.py`` finds the result again. The measuring
itself is in ``engines/calibration``; mlx's engine does it without any of this while it serves.
``first_calibration.py`` has engines adopt what was measured, by whomever.
"""
