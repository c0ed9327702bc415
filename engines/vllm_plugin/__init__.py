"""Cold sessions inside vLLM, by its own plug-in interfaces only; runs in vLLM's processes.

Which process runs what:

    python -m engines.vllm_plugin    ``__main__.py``            starts vLLM, and ends all of it
      API server                     ``process/middleware.py``  the cache header of each answer
                                     ``grammar/``               tries grammars before vLLM has them
      EngineCore                     ``scheduler/``             what to restore, save and drop; the
                                                                gateway's control connection
                                     ``events/inventory.py``    what routers hear of packed blocks
      each worker (a rank)           ``worker/``, ``device/``   the rank's cold store; copies
                                                                between blocks and blobs
    python -m ...calibrate           ``calibration/``           measures codecs; all in one process

A return of a cold session on vLLM, from the request to the save of its turn:

     1. ``connector.py``                  vLLM's scheduler hands a new request to the plug-in
     2. ``scheduler/request_tracker.py``  names the request's session and follows the request
     3. ``scheduler/restores.py``         finds which tokens need no prefill, by asking the ranks
     4. ``scheduler/hub/hub.py``          carries the order to every worker
     5. ``worker/rank.py``                reads and verifies the blobs, so vLLM can be offered them
     6. ``plan.py``                       carries the load, into blocks that vLLM set aside, with
                                          vLLM's next step
     7. ``worker/transfer.py``            unpacks the blobs into the blocks
     8. ``process/middleware.py``         puts into the answer's header what was restored
     9. ``scheduler/turn_saves.py``       the turn ends: plans the save and holds its blocks
    10. ``worker/host_blocks.py``         packs what is new into blobs; on a GPU
                                          ``device/device_save.py`` does
"""
