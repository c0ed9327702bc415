"""Emits LLVM IR for vectors of this host: the operations from which all kernels are built.

``features`` reads the host's instruction sets, ``emitter`` has vectors of fp32, ``dots`` exact
products of small integers, ``dtypes`` rows in the engine's dtypes.
"""
