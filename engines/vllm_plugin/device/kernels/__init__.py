"""Triton kernels that gather and pack rows of paged KV, unpack and scatter them; their launchers.

``row_kernels`` serve a row format and plain copies; ``triton_rows`` launches them. ``rate_kernels``
serve a calibrated fixed rate: ``triton_rates`` has its integers on the device and launches them.
Functions that both use are in ``paged_rows``. The language inside ``@triton.jit`` is not Python:
only launchers are annotated.
"""
