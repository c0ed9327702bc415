"""Triton kernels and their launchers: gather and pack rows of paged KV; unpack and scatter them.

``row_kernels`` handle rotated rows and plain copies; ``triton_rows`` launches them.
``rate_kernels`` handle a calibrated fixed rate; ``triton_rates`` keeps its tables on the device and
launches them. Both use the functions in ``paged_rows``. The language inside ``@triton.jit`` is not
Python, so only launchers are annotated.
"""
