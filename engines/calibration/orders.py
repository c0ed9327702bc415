"""The orders by which an engine measures a model that it serves, each more thorough than the last.

``early_order`` learns from a few texts, and ends as soon as it is certain, by the cases measured so
far, that its presets keep the bound. ``first_order`` measures all cases. ``further_order`` learns
from as many texts as the disk has room for, and includes the densest preset. All measure the same
cases, so that figures can be compared.
"""

from __future__ import annotations

from typing import Final

import msgspec

from engines.calibration.corpus import held_out_texts
from engines.calibration.scratch import room_on_disk
from engines.config import CalibrationOrder
from kvstore.codecs.names import USUAL, first_part, is_learned, session_presets
from kvstore.config import AUTO, StoreConfig
from kvstore.shapes import StateLayout
from kvstore.workers import restoring_threads

# The presets among which ``auto`` chooses, except ``max``, which takes longer to learn than all the
# others together; and those that may serve a model on which the first of these loses too much.
FIRST_PRESETS: Final = (USUAL, "balanced")
FALLBACKS: Final = ("tq4", "safe")
FIRST_CONTEXT: Final = 1024
FIRST_SCORED: Final = 64
# Many short texts teach more than few long ones of as many tokens (decision 59).
FIRST_WINDOWS: Final = 24
FIRST_WINDOW_TOKENS: Final = 512  # at most half of the context: see ``further_order``
PROBED: Final = 0.125  # of each window; the time for it is in proportion
FIRST_CHAINS: Final = 3
EARLY_WINDOWS: Final = 12
DENSEST: Final = "max"  # a learned preset
MOST_WINDOWS: Final = 96  # of ``further_order``
MOST_ROW_BYTES: Final = 8 << 30  # rows to learn from, in an unnamed file
STORED_BYTES: Final = 2  # of a value in that file
LEAST_CONTEXT: Final = 128  # fewer tokens are never packed


class TooShort(ValueError):
    """The engine accepts only prompts that are too short to pack. The message is one sentence."""


def first_order(
    store: StoreConfig, longest: int, data_path: str, least_context: int = 0, state_step: int = 1
) -> CalibrationOrder:
    """Make a quick order: few texts, one context length.

    Args:
        longest: the most tokens of a request, prompt and answer, that the engine can hold.
        data_path: the folder of profiles.
        least_context: the context is at least so long, if the engine can hold it.
        state_step: states exist only after multiples of so many tokens. Texts to learn from reach
            beyond the first one, since the tokens after it show how much its errors matter.

    Raises:
        TooShort: the engine holds too few tokens.
    """
    context = min(max(FIRST_CONTEXT, least_context), (longest - 2 * FIRST_SCORED) // 128 * 128)
    if context < LEAST_CONTEXT:
        raise TooShort(f"the engine accepts at most {longest} tokens")
    window_tokens = max(LEAST_CONTEXT, min(FIRST_WINDOW_TOKENS, context // 2))
    if state_step > 1 and window_tokens < state_step + LEAST_CONTEXT <= context:
        window_tokens = state_step + LEAST_CONTEXT
    named = [store.codec] if store.codec != AUTO else []
    return CalibrationOrder(
        presets=tuple(dict.fromkeys([*FIRST_PRESETS, *named])),
        fallbacks=tuple(x for x in FALLBACKS if x not in named),
        max_kl=store.max_kl,
        contexts=(context,),
        num_windows=FIRST_WINDOWS,
        window_tokens=window_tokens,
        probed_share=PROBED,
        num_scored=FIRST_SCORED,
        depths=(0.5,),
        num_chains=FIRST_CHAINS,
        num_threads=restoring_threads(store.num_threads),
        data_path=data_path,
    )


def early_order(order: CalibrationOrder) -> CalibrationOrder:
    """Return the order to carry out before a first one, for a verdict in a minute or two."""
    num_windows = min(order.num_windows, EARLY_WINDOWS)
    return msgspec.structs.replace(order, num_windows=num_windows, ends_early=True)


def further_order(order: CalibrationOrder, elements_per_token: int) -> CalibrationOrder:
    """Return the order to carry out after a first one, with as many texts as fit on the disk.

    Texts to learn from stay half as long as the measured context, so that the gate also measures
    positions from which a preset did not learn.

    Args:
        elements_per_token: the number of values of a token's rows.
    """
    room = room_on_disk(order.data_path, MOST_ROW_BYTES)
    of_window = max(1, order.window_tokens * elements_per_token * STORED_BYTES)
    num_windows = min(MOST_WINDOWS, room // of_window)
    learned = [x for x in order.presets if is_learned(first_part(x))]
    return msgspec.structs.replace(
        order,
        presets=tuple(dict.fromkeys([*learned, DENSEST])),
        num_windows=max(order.num_windows, num_windows),
    )


def tokens_to_compute(order: CalibrationOrder, states: StateLayout | None = None) -> int:
    """Estimate the number of tokens that a measurement has the model compute.

    Args:
        states: the layout of the model's states; None if it has none. Beside states, the model is
            assumed to have rows of every token.
    """
    num_cases = len(held_out_texts()) + len(order.depths) + order.num_chains
    learned = order.num_windows * order.window_tokens
    presets = order.presets
    if states is not None:
        windows = states.windows is not None
        presets = session_presets(order.presets, True, windows, states.has_matrices)
        learned *= 2 if windows else 1  # windows are learned from further texts
    scored = order.num_scored * (len(presets) + 1)
    return learned + sum(num_cases * (x + scored) for x in order.contexts)
