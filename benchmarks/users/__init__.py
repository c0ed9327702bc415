"""Measures any OpenAI server with simulated users, and finds how many sessions it keeps.

``workload.py`` says who asks what; ``figures.py`` plays it and sums up; ``capacity.py`` opens
sessions until returns are lost.
"""
