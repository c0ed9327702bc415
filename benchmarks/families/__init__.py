"""Models of every family whose cache is more than KV of every token, small enough for any machine.

``windowed`` and ``latent`` give a real model sliding windows and latents, ``trained`` makes tiny
recurrent ones that have learned to recall, by the tasks of ``tasks``; ``figures`` puts them to
sleep.
"""
