"""Has a model measured by its engine's program: ``thermocline calibrate``.

``orders.py`` plans measurements, ``program.py`` runs the program; ``profile_notes.py`` finds the
result again, and ``profile_watch.py`` has engines adopt it. The measuring itself is in
``engines/calibration``; engines that serve do it by themselves, without any of this.
"""
