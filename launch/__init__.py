"""Turns settings into running processes. No other package reads settings from the environment.

The call order of a start: ``cli/main.py`` -> ``cli/options.py`` ->
``settings/effective_settings.py`` -> ``serve/run.py`` -> ``serve/build.py``. ``cli`` imports all
other folders; all may import ``settings``, ``machine`` and ``errors``.
"""
