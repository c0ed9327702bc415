"""Replicas of vLLM on Ray Serve, which starts and ends them; ``ray.sh`` runs it on one machine.

Serve deploys ``application``: replicas (``server``, each with a ``front`` for gateways and its
``own_settings``; ``scaling`` chooses their number) and the list that gateways read
(``replica_directory``). ``local_ray`` starts Ray and the application on this machine.
"""
