"""Turns settings into running processes. Settings are read from the environment only here.

A start: ``cli/main.py`` -> ``cli/options.py`` -> ``settings/effective_settings.py`` ->
``serve/run.py`` -> ``serve/build.py``. ``cli`` is on top and imports all others; ``settings``,
``machine`` and ``errors`` are below all of them.
"""
