"""Models of families whose cache is more than KV of every token, made of the sample model.

``windowed`` gives it sliding windows, ``latent`` latents; ``benchmarks.quality`` measures
them.
"""
