"""Decides who runs, who is hot and who sleeps, without HTTP or arrays; it is given its clock.

The gateway uses ``sessions``. It admits turns (``admission``), keeps one row per session
(``session``, ``table``), updates the rows from the engine's reports (``follower``), chooses
sessions to put to sleep (``sweeps``) and has the engine do it (``moves``). ``headroom`` watches the
memory of the machine. Engines also evict sessions by themselves, and report that.
"""
