"""The settings: their names and types, their sources, and their values on this machine.

Each package defines its settings in its own ``config.py``, and ``schema.py`` joins them.
``sources.py`` reads profiles, files, the environment and flags; ``effective_settings.py`` fills in
the values that depend on the machine.
"""
