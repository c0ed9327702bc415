"""Decides which presets that were learned again replace those in use.

Sessions that rest were packed by the earlier presets, and are not packed again.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final

from engines.calibration.first_order import DENSEST
from engines.calibration.gate.bound import Bound, refusal
from kvstore.codecs.names import first_part
from kvstore.codecs.profile import OF_WINDOWS, Profile
from kvstore.codecs.quality import Quality

logger = logging.getLogger(__name__)

WORTH: Final = 0.9  # of the KL of before: less is no reason to give a preset another form


def was_learned_on(profile: Profile) -> bool:
    """Say whether a profile was learned from more texts than the first verdict takes."""
    return DENSEST in {first_part(x.preset) for x in profile.rows}


def worth_adopting(found: Profile, before: Profile | None, bound: Bound) -> Profile:
    """Leave out of ``found`` each preset that is hardly closer than its earlier form.

    One that keeps ``bound`` takes the place of a form that does not. Forms that were learned from
    keys rotated in another way are not compared.
    """
    if before is None or before.ropes not in ((), found.ropes):
        return found
    names = {first_part(x.preset) for x in found.rows}
    kept = {x for x in names if _is_worth(x, found.rows, before.rows, bound)}
    for name in sorted(names - kept):
        logger.info("%s stays as it was learned before: it is now hardly closer", name)
    dropped = {y for x in names - kept for y in (x, x + OF_WINDOWS)}
    return replace(
        found,
        learned={name: x for name, x in found.learned.items() if name not in dropped},
        rows=tuple(x for x in found.rows if first_part(x.preset) in kept),
    )


def _is_worth(
    name: str, rows: tuple[Quality, ...], old_rows: tuple[Quality, ...], bound: Bound
) -> bool:
    old = {(x.preset, x.context): x for x in old_rows}
    own = [x for x in rows if first_part(x.preset) == name]
    known = [(x, old[x.preset, x.context]) for x in own if (x.preset, x.context) in old]
    if any(refusal(old_rows, x.preset, bound) and not refusal(rows, x.preset, bound) for x in own):
        return True
    return not known or sum(x.kl for x, _ in known) < WORTH * sum(x.kl for _, x in known)
