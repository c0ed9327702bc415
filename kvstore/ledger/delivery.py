"""Brings one session, as of one save, to one tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Final, NamedTuple

import msgspec

from kvstore.blobs.chain import chunk_before
from kvstore.ledger.stack import TierStack
from kvstore.tiers.base import Blob

WRITE_BATCH: Final = 16  # blobs per call to a tier


class Delivery(msgspec.Struct, frozen=True):
    """One session as of one save.

    Args:
        chain: keys of every blob that the record needs, in order.
        fresh: those blobs that this save made, still in memory.
        obsolete: keys of blobs that the older record needed and no record needs now.
        tenant: the session's.
        done: gets whether all of it was written; None: no caller waits for that.
    """

    record_key: bytes
    record: Blob
    chain: Sequence[bytes]
    fresh: Mapping[bytes, Blob] = {}
    obsolete: Sequence[bytes] = ()
    tenant: str = ""
    done: Future[bool] | None = None

    def end(self, is_written: bool) -> None:
        """Answer the caller that waits, if there is one."""
        if self.done is not None:
            self.done.set_result(is_written)

    @property
    def nbytes(self) -> int:
        """Packed bytes that wait in memory."""
        return len(self.record) + sum(map(len, self.fresh.values()))


class Delivered(NamedTuple):
    recorded: bool  # the tier's record is now the new one
    complete: bool  # and no blob that it needs is missing


def deliver(stack: TierStack, level: int, delivery: Delivery, *, whole: bool) -> Delivered:
    """Make one tier hold the session. A tier that could not take all of it keeps an older record.

    Args:
        whole: also copy blobs of older saves that the tier lacks from the faster tiers. Without it
            only the fresh blobs are written.
    """
    wanted = delivery.chain if whole else [x for x in delivery.chain if x in delivery.fresh]
    held = stack.holds(level, wanted)
    missing = [key for key, there in zip(wanted, held, strict=True) if not there]
    complete = _write(stack, level, delivery, missing)
    # Part of a session is better than none, but not better than an older one that is whole.
    if not complete and stack.may_hold(level, delivery.record_key):
        return Delivered(False, False)
    end = _end(stack, level, delivery, complete)
    if not stack.replace(level, delivery.record_key, delivery.record, delivery.tenant, end):
        return Delivered(False, False)
    stack.saved_by(level, delivery.tenant, [delivery.record_key, *delivery.chain])
    return Delivered(True, stack.delete(level, delivery.obsolete) and complete)


def _write(stack: TierStack, level: int, delivery: Delivery, missing: Sequence[bytes]) -> bool:
    """Write the missing blobs, as far as a tier has them; True if that was all of them."""
    batches = (missing[i : i + WRITE_BATCH] for i in range(0, len(missing), WRITE_BATCH))
    return all(_write_batch(stack, level, delivery, batch) for batch in batches)


def _end(stack: TierStack, level: int, delivery: Delivery, complete: bool) -> bytes:
    """Return the last key of the chain that a tier holds; b"" = none."""
    chain = delivery.chain
    if complete and chain:
        return chain[-1]
    held = stack.holds(level, chain)
    return next((key for key, yes in zip(chain[::-1], held[::-1], strict=True) if yes), b"")


def _write_batch(stack: TierStack, level: int, delivery: Delivery, keys: Sequence[bytes]) -> bool:
    blobs = {key: delivery.fresh[key] for key in keys if key in delivery.fresh}
    for faster in range(level):
        rest = [key for key in keys if key not in blobs]
        found = stack.find(faster, rest) if rest else []
        blobs |= {key: x for key, x in zip(rest, found, strict=True) if x is not None}
    items = [(key, blobs[key]) for key in keys if key in blobs]
    after = chunk_before(delivery.chain, keys[0])
    return stack.put(level, items, delivery.tenant, after) and len(items) == len(keys)
