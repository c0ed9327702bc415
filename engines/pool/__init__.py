"""The engines of one gateway: the replicas of a model, and models that are loaded on demand.

``replica_pool`` is one engine to the gateway, made of a list of ``replica``s that is fixed, or that
an orchestrator serves (``listed_pool``); ``replica_choice`` picks the one for a session.

``loading`` loads models in turn and unloads them; ``on_demand`` has the states of one. Models come
from the folder that ``hub_cache`` keeps, with ``hub_program`` in a process of its own.
"""
