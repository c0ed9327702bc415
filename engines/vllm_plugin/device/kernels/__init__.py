"""Triton kernels that gather and pack rows of paged KV, unpack and scatter them; their launchers.

``row_kernels`` are those of a row format and of plain copies, ``triton_rows`` launches them.
``rate_kernels`` are those of a calibrated fixed rate: ``rate_tables`` are its integers on the
device, ``angles`` the turns of its keys, and ``triton_rates`` launches them. What both share is in
``paged_rows``. The language inside ``@triton.jit`` is not Python's: only launchers are annotated.
"""
