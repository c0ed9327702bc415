"""A process that takes whole sessions out of a serving vLLM with states, and prints what it saw."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.shapes import KVRun
from tests.vllm.rig.instrument import seen_by
from tests.vllm.rig.instrument_facts import CONTEXT, TOKENS

EARLIER = CONTEXT - 300  # no whole number of blocks


def look(instrument: Any) -> dict[str, object]:
    prompt, rest = TOKENS[:CONTEXT], TOKENS[CONTEXT:]
    stranger = instrument.prefill(TOKENS[1 : EARLIER + 1])
    earlier = instrument.prefill(prompt[:EARLIER])
    whole = instrument.prefill(prompt)
    # As a session does that has slept: on by a turn after the earlier one.
    later = instrument.prefill(prompt, earlier)
    wrong = instrument.prefill(prompt, replace(earlier, state=stranger.state))
    scores = instrument.log_probs(whole, rest)
    again = instrument.log_probs(later, rest)
    return {
        "tokens": [stranger.num_tokens, earlier.num_tokens, whole.num_tokens, later.num_tokens],
        "later": _difference(_values(whole.run), _values(later.run)),
        "wrong": _difference(_values(whole.run), _values(wrong.run)),
        "rows alone": _difference(_values(whole.run), _values(instrument.rows(prompt))),
        "scores": _difference(scores, again),
    }


def _values(run: KVRun) -> np.ndarray:
    """V of the first layer that keeps all tokens: keys may be turned by another token's position.

    vLLM's CPU build does that to LFM2.
    """
    return run[0][1]


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())


if __name__ == "__main__":
    print("facts:", json.dumps(seen_by(look, Path(sys.argv[1]), **json.loads(sys.argv[2]))))
