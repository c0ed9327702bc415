"""The engines of one gateway: the replicas of a model, and models that are loaded on demand.

``replica_pool`` joins the replicas of a model (``replica``) into one engine for the gateway. Their
list is fixed, or an orchestrator serves it (``listed_pool``). ``replica_choice`` chooses the
replica of a session.

``loading`` loads models on demand and unloads them; ``on_demand`` is the state of one.
``hub_cache`` lists, downloads and deletes models, with ``hub_program`` in a process of its own.
"""
