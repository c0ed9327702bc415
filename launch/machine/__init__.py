"""This machine: its memory, GPUs, BLAS, Python interpreters and default folders."""
