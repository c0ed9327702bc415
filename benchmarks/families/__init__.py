"""Models of every family whose cache is more than KV of every token, small enough for any machine.

``windowed`` gives a real model sliding windows, ``trained`` makes tiny recurrent ones and one with
latents that have learned to recall, by the tasks of ``tasks``; ``figures`` puts them to sleep.
"""
