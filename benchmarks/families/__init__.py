"""Makes models with sliding windows (``windowed``) or latents (``latent``) of the sample model.

``benchmarks.quality`` measures them.
"""
