"""The gateway's end of an engine: one HTTP exchange per request, one control connection.

``engine_client`` is the whole; ``connection`` posts a request and reads the response, and
``second_try`` asks once more where an engine has ended; ``control_link`` carries verbs and notices.
``child_engine`` adds the process, if it is ours, and ``supervisor`` starts it again when it ends.
"""
