"""Samples from which presets learn, how much their errors matter, and theoretical bounds.

``samples`` (KV of some texts, and its statistics), ``sensitivity`` (how much errors matter), with
``attention``; ``bounds`` of rate-distortion theory; ``array_checks`` checks the arrays of a profile
before kernels read them.
"""
