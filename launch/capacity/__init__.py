"""Turns "so many sessions of so many tokens" into budgets for this machine, or says how many fit.

``needs.py`` counts what sessions take, ``rooms.py`` what this machine has, ``fit.py`` brings both
together, and ``wish.py`` puts the result into the settings and into words.
"""
