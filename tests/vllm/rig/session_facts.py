"""A process that takes whole sessions out of a model with states, and prints what it saw.

A process of its own: vLLM runs in one process here, and the tests' own engine does not.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

import numpy as np

from kvstore.shapes import KVRun
from tests.vllm.rig.calibration_facts import CONTEXT, TOKENS, order

EARLIER = CONTEXT - 300  # no whole number of blocks


def main(model: str, *args: str) -> dict[str, object]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from engines.vllm_plugin.calibration.calibration_engine import open_engine
    from engines.vllm_plugin.calibration.session_instrument import (
        VllmSessionInstrument,
        open_instrument,
    )

    instrument = open_instrument(open_engine(order(model, *args)), None)
    assert isinstance(instrument, VllmSessionInstrument)
    prompt, rest = TOKENS[:CONTEXT], TOKENS[CONTEXT:]
    stranger = instrument.prefill_whole(TOKENS[1 : EARLIER + 1])
    earlier = instrument.prefill_whole(prompt[:EARLIER])
    whole = instrument.prefill_whole(prompt)
    # As a session does that has slept: on by a turn after the earlier one.
    later = instrument.prefill_whole(prompt, earlier)
    wrong = instrument.prefill_whole(prompt, replace(earlier, state=stranger.state))
    scores = instrument.log_probs_whole(whole, rest)
    again = instrument.log_probs_whole(later, rest)
    facts = {
        "tokens": [stranger.num_tokens, earlier.num_tokens, whole.num_tokens, later.num_tokens],
        "later": _difference(_values(whole.run), _values(later.run)),
        "wrong": _difference(_values(whole.run), _values(wrong.run)),
        "rows alone": _difference(_values(whole.run), _values(instrument.prefill(prompt))),
        "scores": _difference(scores, again),
    }
    instrument.close()
    return facts


def _values(run: KVRun) -> np.ndarray:
    """V of the first layer that keeps all tokens: keys may be turned by another token's position.

    vLLM's CPU build does that to LFM2.
    """
    return run[0][1]


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())


if __name__ == "__main__":
    print("facts:", json.dumps(main(*sys.argv[1:])))
