"""Learning on after the first verdict: from more texts, and what takes long to learn.

A first start is judged by what eight texts taught, so that sessions are packed soon. Afterwards
the same work goes on in idle moments with up to ``MOST_WINDOWS`` texts and the densest preset, and
is judged by the same cases, so that figures can be compared. What it finds is adopted preset by
preset, and only where it is worth it: sessions that rest were packed by what was learned before.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from typing import Final

import msgspec

from engines.calibration.messages import CalibrationOrder
from kvstore.codecs.names import DENSEST, LEARNABLE, first_part
from kvstore.codecs.profile import OF_WINDOWS, Profile
from kvstore.codecs.quality import Quality

logger = logging.getLogger(__name__)

MOST_WINDOWS: Final = 48
PROBED: Final = 0.25  # of each window
MOST_ROW_BYTES: Final = 8 << 30  # of rows to learn from, in a file without a name
FREE_SHARE: Final = 4  # a quarter of what is free on that disk at most
STORED_BYTES: Final = 2  # of a value in that file
WORTH: Final = 0.9  # of the KL of before: less is no reason to give a preset another form


def further_order(order: CalibrationOrder, elements_per_token: int) -> CalibrationOrder:
    """Make the order that follows a first one.

    Args:
        elements_per_token: of the rows that are learned from.
    """
    room = min(MOST_ROW_BYTES, shutil.disk_usage(order.data_path).free // FREE_SHARE)
    of_window = max(1, order.window_tokens * elements_per_token * STORED_BYTES)
    num_windows = max(order.num_windows, min(MOST_WINDOWS, room // of_window))
    learned = [x for x in order.presets if first_part(x) in LEARNABLE]
    return msgspec.structs.replace(
        order,
        presets=tuple(dict.fromkeys([*learned, DENSEST])),
        num_windows=num_windows,
        probed_share=PROBED,
    )


def worth_adopting(found: Profile, before: Profile | None) -> Profile:
    """Leave out of ``found`` each preset that is hardly closer than what it had learned before."""
    if before is None:
        return found
    old = {(x.preset, x.context): x for x in before.rows}
    names = {first_part(x.preset) for x in found.rows}
    kept = {x for x in names if _is_worth(x, found.rows, old)}
    for name in sorted(names - kept):
        logger.info("%s stays as it was learned first: more texts made it hardly closer", name)
    dropped = {y for x in names - kept for y in (x, x + OF_WINDOWS)}
    return replace(
        found,
        learned={name: x for name, x in found.learned.items() if name not in dropped},
        rows=tuple(x for x in found.rows if first_part(x.preset) in kept),
    )


def _is_worth(name: str, rows: tuple[Quality, ...], old: dict[tuple[str, int], Quality]) -> bool:
    own = [x for x in rows if first_part(x.preset) == name]
    known = [(x, old[x.preset, x.context]) for x in own if (x.preset, x.context) in old]
    return not known or sum(x.kl for x, _ in known) < WORTH * sum(x.kl for _, x in known)
