"""Live KV as mlx_lm keeps it: its layout, and the way to numpy arrays and back."""
