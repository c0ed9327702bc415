"""Finds which of an agent's two rows a request goes on with: its conversation, or what is beside.

Agents ask short things under the id of their conversation: a title, a summary of a page, whether
the server is there. Such a request shares nothing with the conversation, and in its row it would
take the place of all that was computed for it. So an id has two rows, ``ID`` and ``ID/beside``; a
request goes to the one that begins as it does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from gateway.prefixes.outline import DIGEST_BYTES, Outline

SUFFIX: Final = "/beside"
_MUCH_SHORTER: Final = 2  # times


class Row(NamedTuple):
    """The row of a request."""

    id: str
    is_lesser: bool = False  # the other row holds more


def row_of(
    session_id: str,
    now: Outline,
    latest: Callable[[str], Outline | None],
    is_quiet: Callable[[str], bool],
) -> Row:
    """Choose the row of a request that names ``session_id``.

    Args:
        latest: the latest request of a row; None if none is remembered.
        is_quiet: says whether nothing of a row is being served.
    """
    beside = session_id + SUFFIX
    held = latest(session_id)
    if held is None or begin_alike(held, now):
        return _row(session_id, now, latest(beside))
    other = latest(beside)
    if other is not None and begin_alike(other, now):
        return _row(beside, now, held)
    largest = max(held.size, other.size if other else 0)
    if now.size * _MUCH_SHORTER >= largest and is_quiet(session_id):
        return Row(session_id)  # as a client does that begins anew
    if other is not None and other.size > held.size:
        return _row(session_id, now, other)
    return _row(beside, now, held)


def begin_alike(one: Outline, other: Outline) -> bool:
    """Say whether two requests have a system text or a first message in common."""
    if one.system and one.system == other.system:
        return True
    return one.messages[:DIGEST_BYTES] == other.messages[:DIGEST_BYTES]


def _row(id: str, now: Outline, other: Outline | None) -> Row:
    return Row(id, other is not None and now.size < other.size)
