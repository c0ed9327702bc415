"""The mlx_lm engine: a process of its own, ``python -m engines.mlx_worker``.

Imported by nobody. One owner thread touches mlx; an asyncio side speaks HTTP and the control
protocol; codec threads see numpy only.
"""
