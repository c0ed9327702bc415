"""Samples from which presets learn, the allocation of bits, and theoretical bounds.

``samples`` (KV of some texts), ``sensitivity`` (how much errors matter), ``statistics`` of them,
``allocation`` of bits, ``bounds`` of rate-distortion theory; ``array_checks`` checks the arrays
of a profile before kernels read them.
"""
