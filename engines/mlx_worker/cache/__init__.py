"""Live KV as mlx_lm keeps it, or packed: its layout, and its conversion from and to numpy."""
