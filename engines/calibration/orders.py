"""The orders by which an engine measures a model that it serves, each more thorough than the last.

``early_order`` learns from a few texts, and ends as soon as the cases seen leave no doubt that its
presets keep the bound. ``first_order`` judges by all cases. ``further_order`` learns from as many
texts as there is room for, and has the densest preset. All judge by the same cases, so that figures
can be compared.
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

# The presets that ``auto`` chooses among except ``max``, which takes longer to learn than all the
# others together; and those that may serve where the first of these loses too much.
FIRST_PRESETS: Final = (USUAL, "balanced")
FALLBACKS: Final = ("tq4", "safe")
FIRST_CONTEXT: Final = 1024
FIRST_SCORED: Final = 64
# Many short texts teach more than few long ones of as many tokens (decision 59).
FIRST_WINDOWS: Final = 24
FIRST_WINDOW_TOKENS: Final = 512  # at most half of the context: see ``further_order``
PROBED: Final = 0.125  # of each window: twice as much takes twice as long to look at
FIRST_CHAINS: Final = 3
EARLY_WINDOWS: Final = 12
DENSEST: Final = "max"  # it learns
MOST_WINDOWS: Final = 96  # of an order that follows
MOST_ROW_BYTES: Final = 8 << 30  # of rows to learn from, in a file without a name
STORED_BYTES: Final = 2  # of a value in that file
LEAST_CONTEXT: Final = 128  # fewer tokens are never packed


class TooShort(ValueError):
    """The engine takes no prompt that is worth packing. The message is one sentence."""


def first_order(
    store: StoreConfig, longest: int, data_path: str, least_context: int = 0, state_step: int = 1
) -> CalibrationOrder:
    """Make a quick order: few texts, one context length.

    Args:
        longest: tokens that the engine can hold of one request, prompt and answer.
        data_path: the folder of profiles.
        least_context: so many tokens, if the engine can hold them, are needed to judge by.
        state_step: a state can rest only after a multiple of so many tokens. What follows the first
            of them looks back on it, so texts to learn from reach beyond it.

    Raises:
        TooShort: see there.
    """
    context = min(max(FIRST_CONTEXT, least_context), (longest - 2 * FIRST_SCORED) // 128 * 128)
    if context < LEAST_CONTEXT:
        raise TooShort(f"the engine takes no more than {longest} tokens")
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
    """Make the order that goes before a first one, for a verdict within a minute or two."""
    num_windows = min(order.num_windows, EARLY_WINDOWS)
    return msgspec.structs.replace(order, num_windows=num_windows, ends_early=True)


def further_order(order: CalibrationOrder, elements_per_token: int) -> CalibrationOrder:
    """Make the order that follows a first one, with as many texts as there is room for.

    Their length stays half of that by which is judged, so that the gate sees what a preset makes of
    positions that it did not learn from.

    Args:
        elements_per_token: of the rows that are learned from.
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
    """Reckon how many tokens a measurement has the model compute, to learn from and to judge by.

    What the ends of texts look back on is part of reading them.

    Args:
        states: what the model keeps besides rows of every token, which it is taken to keep, too.
    """
    num_cases = len(held_out_texts()) + len(order.depths) + order.num_chains
    learned = order.num_windows * order.window_tokens
    presets = order.presets
    if states is not None:
        windows = states.windows is not None
        presets = session_presets(order.presets, True, windows, states.has_matrices)
        learned *= 2 if windows else 1  # their rows are learned from texts of their own
    scored = order.num_scored * (len(presets) + 1)
    return learned + sum(num_cases * (x + scored) for x in order.contexts)
