"""The settings: their names and types, their sources, and the values that are used on this machine.

A setting is a field in the ``config.py`` of its own package (``schema.py`` joins them);
``sources.py`` reads profiles, files, the environment and flags, and ``effective_settings.py`` adds
what depends on the machine.
"""
