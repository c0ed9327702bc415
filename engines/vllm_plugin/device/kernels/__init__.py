"""Triton kernels that gather and pack rows of paged KV, unpack and scatter them; their launchers.

``row_kernels`` are those of a row format, ``triton_rows`` launches them. The language inside
``@triton.jit`` is not Python's: only launchers are annotated.
"""
