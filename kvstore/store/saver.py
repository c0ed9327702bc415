"""Saves turns, off the critical path.

One thread takes saves from the queue, one at a time. It saves first into the fastest tier, then
into the others, packed anew from the same rows for a slower tier with a codec of its own. Only
chunks that no tier holds are encoded, by the codec threads, so the work is proportional to the new
tokens. An existing chunk is never encoded again, nor are rows that were restored from a lossy copy
of it, so a session that sleeps a hundred times loses precision only once. The record is written
last: a reader that finds it also finds the blobs that it names. The process may end at any moment:
the session is then as it was after this turn or the one before. A power cut may lose the sessions
that were being saved, because the disk tier overwrites replaced data before its last commit is
certain to have reached the medium; lost sessions are computed anew.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Final

from kvstore.blobs.packer import Packer
from kvstore.ledger.ledger import Ledger
from kvstore.store.encoder import Encoded, Encoder, Turn, pack_again
from kvstore.store.records import Reviser, SessionRecord
from kvstore.store.save_queue import OnDone, SaveJob, SaveQueue
from kvstore.store.token_keys import TokenKeys
from kvstore.tiers.base import Blob

LOOK_S: Final = 15.0  # how long one wait for the queue may take

_log = logging.getLogger(__name__)


class Saver:
    """Owns the thread that saves."""

    def __init__(
        self,
        queue: SaveQueue,
        encoder: Encoder,
        packer: Packer,
        keys: TokenKeys,
        ledger: Ledger[SessionRecord],
    ) -> None:
        self._queue = queue
        self._encoder = encoder
        self._fingerprint = packer.fingerprint
        self._reviser = Reviser(ledger.index, packer, keys.space.chunk_tokens)
        self._keys = keys
        self._ledger = ledger
        self._thread = threading.Thread(target=self._run, name="kvstore-save", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        while not self._queue.closed:
            job = self._queue.take(LOOK_S)
            if job is not None:
                self._serve(job)
            job = None  # its listeners may hold a session's KV: release it during the next wait

    def _serve(self, job: SaveJob) -> None:
        record = None
        try:
            record = self._save(job)
        except Exception:  # the outermost frame of this thread: a bad save must not end the others
            _log.exception("a session could not be saved")
        self._ledger.counters.add("saves" if record else "saves_failed")
        self._queue.finish(job)
        for on_done in job.on_done:
            _call(on_done, record)

    def _save(self, job: SaveJob) -> SessionRecord | None:
        root = self._keys.space.root(job.session.salt)
        chain = self._keys.space.chain(root, job.tokens)
        turn = Turn(job, root, chain, self._ledger.find(job.session))
        encoded = self._encoder.encode(turn)
        record = SessionRecord(
            tenant=job.session.tenant,
            id=job.session.id,
            fingerprint=self._fingerprint,
            root=root,
            token_ids=job.tokens.tobytes(),
            tail_tokens=len(job.tokens) % self._keys.space.chunk_tokens,
            snapshots=encoded.snapshots,
            last_used_s=self._ledger.clock(),
        )
        spans = self._keys.spans(record, chain)
        record, obsolete = self._reviser.revise(record, turn.old, turn.common, spans, encoded.fresh)
        forms = self._forms(job, encoded)
        save = self._ledger.committer.save
        return record if save(record, encoded.fresh, obsolete, encoded.codecs, forms) else None

    def _forms(self, job: SaveJob, encoded: Encoded) -> Iterator[tuple[str, dict[bytes, Blob]]]:
        """Pack in every other codec that a tier has, then release the hot bytes."""
        try:
            others = encoded.codecs.on(self._ledger.stack.names)[1:] if encoded.wanted else ()
            for codec in others:
                if self._queue.is_pressed(job):
                    # Denser blobs would be better, but later ones would be worse.
                    self._ledger.counters.add("saves_copied")
                    return
                workers, lineages = self._ledger.workers, encoded.lineages
                yield codec.id, pack_again(workers, encoded.wanted, lineages, codec)
        finally:
            encoded.wanted.clear()
            self._queue.encoded(job)


def _call(on_done: OnDone, record: SessionRecord | None) -> None:
    try:
        on_done(record)
    except Exception:  # the listener's own defect must not end the saving thread
        _log.exception("a listener of a finished save failed")
