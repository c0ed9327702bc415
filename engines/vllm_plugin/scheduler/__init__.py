"""The plug-in's side in EngineCore, beside vLLM's own scheduler: what to restore, save and drop.

``scheduler_side`` is the whole. ``request_tracker`` follows vLLM's requests (each a
``tracked_request``): ``restores`` on the way in (``probes`` while there is no room to stage,
``staging_budget``), ``turn_saves`` on the way out (``postponed_saves``), ``token_blocks`` between.
``resident_sessions`` knows what vLLM itself still holds of a session, ``eviction_watch`` reports
when that is gone, ``verbs`` obeys the gateway. ``hub`` is the way to the workers.
"""
