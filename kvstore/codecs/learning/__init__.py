"""Samples to learn from, the allocation of bits, and bounds that no codec can beat.

``samples`` (KV of some texts), ``sensitivity`` (how much errors matter), ``statistics`` of them,
``allocation`` of bits, ``bounds`` of rate-distortion theory; ``array_checks`` looks at the arrays
of a profile before kernels read them.
"""
