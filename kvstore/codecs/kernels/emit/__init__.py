"""Emits LLVM IR for vectors of this host: the operations from which all kernels are built.

``emitter`` has vectors of fp32 and the host's instruction sets, ``dots`` exact products of small
integers, ``dtypes`` rows in the engine's dtypes, ``loop_tiles`` the tiles of ``one_step``.
"""
