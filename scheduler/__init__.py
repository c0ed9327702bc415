"""Decides which sessions are hot and which sleep; pure logic: no HTTP, no arrays, no own clock.

``sessions`` is the front: it admits turns (``admission``), keeps rows (``table``, ``session``)
true to what the engine says (``follower``), looks for sessions to put to sleep (``sweeps``,
``policy``, ``headroom``) and has the engine do it (``moves``). Who sleeps first is the order of
``policy``, over the queues of ``table``.
"""
