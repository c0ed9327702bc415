"""Cold sessions inside vLLM, by its own plug-in interfaces only; runs in vLLM's processes.

The processes and the code that each runs:

    python -m engines.vllm_plugin    ``__main__.py``            starts and ends all of vLLM
      API server                     ``process/middleware.py``  sets the cache header of each answer
                                     ``grammar/``               tries grammars before vLLM does
      EngineCore                     ``scheduler/``             plans restores, saves and drops; has
                                                                the gateway's control connection
                                     ``inventory.py``           reports packed blocks to routers
      each worker (a rank)           ``worker/``, ``device/``   the rank's cold store; copies
                                                                between blocks and blobs

A return of a cold session on vLLM, from the request to the save of its turn:

     1. ``connector.py``                  vLLM's scheduler hands a new request to the plug-in
     2. ``scheduler/request_tracker.py``  names the request's session and follows the request
     3. ``scheduler/restores.py``         finds which tokens need no prefill, by asking the ranks
     4. ``scheduler/hub.py``              carries the order to every worker
     5. ``worker/rank.py``                reads and verifies the blobs, so vLLM can be offered them
     6. ``plan.py``                       carries the load, into blocks that vLLM set aside, with
                                          vLLM's next step
     7. ``worker/transfer.py``            unpacks the blobs into the blocks
     8. ``process/middleware.py``         reports the restored tokens in the answer's header
     9. ``scheduler/turn_saves.py``       the turn ends: plans the save and holds its blocks
    10. ``blocks/host_blocks.py``         packs new blocks into blobs; on a GPU
                                          ``device/device_blocks.py`` does
"""
