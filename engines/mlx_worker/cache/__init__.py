"""Live KV as mlx_lm keeps it, or packed: its layout, and the way to numpy arrays and back."""
