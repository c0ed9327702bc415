"""Decides who runs, who is hot and who sleeps: no HTTP, no arrays, ages by an injected clock.

Engines evict by themselves as well, when they run out of memory; their reports say so.

``sessions`` is the front: it admits turns (``admission``), keeps rows (``table``, ``session``)
true to the engine's reports (``follower``), looks for sessions to put to sleep (``sweeps``) and
has the engine do it (``moves``). ``sweeps`` defines the order in which they go, over the queues of
``table``; ``headroom`` watches the memory of the machine.
"""
