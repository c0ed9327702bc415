"""Triton kernels that gather and pack rows of paged KV, unpack and scatter them; their launchers.

``row_kernels`` serve a row format and plain copies; ``triton_rows`` launches them. ``rate_kernels``
serve a calibrated fixed rate: ``rate_tables`` has its integers on the device, ``angles`` the
rotations of its keys, and ``triton_rates`` launches them. Functions that both use are in
``paged_rows``. ``attend_kernels`` multiply packed rows and add them up as they are;
``triton_attention`` launches them. The language inside ``@triton.jit`` is not Python: only
launchers are annotated.
"""
