"""Emits LLVM IR for vectors of this host: the operations that all kernels are written in.

``features`` asks the host what it can do, ``emitter`` has vectors of fp32, ``dots`` exact products
of small integers, ``dtypes`` rows in the engine's dtypes.
"""
