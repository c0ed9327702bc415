"""Measures any OpenAI server with simulated users, and finds how many sessions it keeps.

``workload.py`` describes the users' requests; ``figures.py`` sends them and sums up their times;
``capacity.py`` opens sessions until some are lost.
"""
