"""Measures any OpenAI server with simulated users, and finds how many sessions it keeps.

``workload.py`` says who asks what, ``presets.py`` has ready ones; ``users.py`` plays them;
``capacity.py`` opens sessions until returns are lost; ``figures.py`` sums up,
``picture.py`` draws, and ``program.py`` runs it all.
"""
