"""Gives vLLM cold sessions through its own plug-in interfaces; runs inside vLLM's processes.

The processes and the code that each runs:

    python -m engines.vllm_plugin    ``__main__.py``            starts and ends all of vLLM
      API server                     ``process/middleware.py``  sets the cache header of each answer
                                     ``grammar/``               tries grammars before vLLM does
      EngineCore                     ``scheduler/``             plans restores, saves and drops; has
                                                                the gateway's control connection
                                     ``inventory.py``           reports packed blocks to routers
      each worker (a rank)           ``worker/``, ``device/``   the rank's cold store; copies
                                                                between blocks and blobs

How a cold session returns and how its turn is saved is described step by step in
``docs/architecture.md``; the stages of a request are in ``scheduler/request_tracker.py``.
"""
