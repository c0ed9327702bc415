"""The gateway's end of an engine: one HTTP exchange per request, one control connection.

``engine_client`` joins the parts: ``connection`` posts a request and reads the response,
``second_try`` sends it once more if the engine ended, and ``control_link`` carries verbs and
notices. ``child_engine`` adds a process that we start, and ``supervisor`` restarts it when it ends.
"""
