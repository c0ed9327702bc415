"""The rotated row format at memory speed: numba functions whose bodies are LLVM IR written here.

numba's own loops reach a tenth of memory speed on this job: LLVM does not see that comparing 16
values *is* two bytes of a bit plane. Written as IR that is plain to see, and the just-in-time
compiler still picks the best instructions of the host, be it AVX-512, AVX2 or NEON.

Nothing here is imported unless numba is installed and a codec is used; see ``codecs.backend``.
"""
