"""Samples from which presets learn, and how much their errors matter.

``samples`` has the KV of some texts and its statistics; ``sensitivity``, with ``attention``, how
much errors matter.
"""
