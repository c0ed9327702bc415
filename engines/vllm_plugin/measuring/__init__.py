"""Measures codecs' errors on the served model, with ordinary requests to vLLM while it is idle.

Each rank runs ``engines.calibration`` on a thread, with ``serving_instrument``. Work that needs the
model becomes a request:

    rank    forward_client       orders it, and prepares KV in the ``exchange``
    hub     measured_requests    waits until all ranks have ordered it and no other request runs
    front   request_runner       submits it to vLLM
    core    measured_requests    names the blocks that get the prepared KV, and those to read
    rank    exchange             fills and reads them, inside the step
            model_access         notes the log-probabilities of the prompt's tokens
    hub     measured_requests    informs the ranks that the request has ended
"""
