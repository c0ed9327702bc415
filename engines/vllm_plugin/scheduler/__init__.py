"""The plug-in's side in EngineCore, next to vLLM's scheduler: plans restores, saves and drops.

``scheduler_side`` assembles the parts. ``request_tracker`` follows vLLM's requests (each a
``tracked_request``): ``shared_prefills`` and ``restores`` when they come, ``turn_saves`` when they
end. ``measured_requests`` are those of a measurement. ``resident_sessions`` finds the blocks of a
session that vLLM itself still holds. ``welcome`` has the gateway's greeting, ``verbs`` carries out
its orders. ``hub`` connects to the workers.
"""
