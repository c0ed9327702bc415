"""The plug-in's side in EngineCore, next to vLLM's scheduler: plans restores, saves and drops.

``scheduler_side`` assembles the parts. ``request_tracker`` follows vLLM's requests, each with a
record in ``tracked_request``: when a request comes, ``shared_prefills`` and ``restores`` decide
which of its tokens are prefilled; when it ends, ``turn_saves`` plans its save.
``measured_requests`` follows the requests of a measurement. ``resident_sessions`` finds the blocks
of a session that vLLM still holds. ``welcome`` makes the greeting to the gateway, and ``verbs``
carries out the gateway's verbs. ``hub`` connects to the workers.
"""
