"""Turns settings into running processes; the composition root, and alone reads the environment.

A start: ``cli/main.py`` -> ``cli/options.py`` -> ``settings/effective_settings.py`` ->
``serve/run.py`` -> ``serve/build.py``. Imports inside the package run one way: cli, doctor, serve,
plan, calibrate, model, settings, sample, machine, errors.
"""
