"""The gateway's end of an engine: one HTTP exchange per request, one control connection.

``engine_client`` is the whole; ``http_exchange`` posts a request and ``http_response`` reads its
answer, ``stall_watchdog`` gives up on one that hangs; ``control_link`` carries verbs and notices;
``address`` says where the engine listens. ``child`` adds the process, if it is ours.
"""
