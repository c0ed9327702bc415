"""Replicas of vLLM on Ray Serve, which come and go as Ray says; ``ray.sh`` starts them here.

``application`` is deployed by Serve: replicas (``server``, each with a ``front`` for gateways, its
``own_settings`` and ``scaling``) and the list that gateways read (``replica_directory``).
``local_ray`` starts all of it on this machine.
"""
