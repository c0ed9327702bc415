"""Measures what codecs cost, by ordinary requests to the vLLM that serves, in its idle moments.

Each rank runs ``engines.calibration`` on a thread, with ``serving_instrument``. What needs the
model becomes a request:

    rank    forward_client       orders it, and puts KV ready in the ``exchange``
    hub     forwards             waits until all ranks have ordered it and no other request runs
    front   request_runner       puts it to vLLM
    core    measured_requests    says which blocks get the KV that is ready, and which are read
    rank    exchange             fills and reads them, inside the step
            forced_tokens        a logits processor: forces the answer, notes its log-probabilities
    hub     forwards             informs the ranks that it is over
"""
