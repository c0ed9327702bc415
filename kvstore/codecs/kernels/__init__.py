"""Codecs at memory speed: numba functions, most of whose bodies are LLVM IR written here.

numba's own loops reach a tenth of memory speed on this task: LLVM does not see that comparing 16
values *is* two bytes of a bit plane. In IR this is explicit, and the just-in-time compiler still
picks the best instructions of the host, such as AVX-512, AVX2 or NEON.

``emit`` has the operations on vectors; ``rows`` has the kernels of the row codecs (``tq1`` to
``tq8``) and of attention to packed rows, ``units`` those of the calibrated presets (``fixed_rate``,
``one_step``). numpy defines their results; each kernel is compared with that definition before it
is used.

Nothing here is imported unless numba is installed and a codec is used; see ``rows.backend``.
"""
