"""What the owner thread does with requests once they are in: feed, decode, end.

At its end a turn's KV stays as an idle hot session and is saved, whether the turn ran to its end
or was cancelled half-way: what was computed is computed.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from concurrent.futures import Future
from copy import deepcopy

import numpy as np

from engines.mlx_worker import parking
from engines.mlx_worker.arrivals import Arrivals
from engines.mlx_worker.batching import Batches, Bucket, Detached, Step
from engines.mlx_worker.generation import Event, Failed, Finished, FinishReason, Prefill
from engines.mlx_worker.keeping import Keeper, Tell
from engines.mlx_worker.logprobs import token_event
from engines.mlx_worker.prefill import Feeder
from engines.mlx_worker.room import Room
from engines.mlx_worker.stream import Outbox
from engines.mlx_worker.turn import Caches, LiveRow, Prompt, SessionKey, Turn
from kvstore.snapshot import Snapshot

logger = logging.getLogger(__name__)


class Serving:
    """Belongs to the owner thread."""

    def __init__(
        self,
        arrivals: Arrivals,
        feeder: Feeder,
        batches: Batches,
        admitted: dict[Prompt, None],
        room: Room,
        keeper: Keeper,
        outbox: Outbox,
        tell: Tell,
    ) -> None:
        """``admitted``: prompts on their way into a batch, shared with ``arrivals``."""
        self._arrivals = arrivals
        self._feeder = feeder
        self._batches = batches
        self._admitted = admitted
        self._room = room
        self._keeper = keeper
        self._outbox = outbox
        self._tell = tell
        self._entries = itertools.count()
        # From arrival to the last event. A row is in a batch or on its way there, but in the midst
        # of a step it may be in neither; whoever must miss nobody asks here.
        self._live: dict[Turn, None] = {}
        self.counters: Counter[str] = Counter()

    @property
    def is_working(self) -> bool:
        """There is something to compute right now."""
        return bool(len(self._batches) or len(self._feeder))

    def arrive(self, turn: Turn, prompts: list[Prompt]) -> None:
        self.counters["turns"] += 1
        self._live[turn] = None
        if key := turn.key:
            self._keeper.hot.begin_turn(key, len(turn.generation.prompt))
        for prompt in prompts:
            self._arrivals.arrive(prompt)

    # ---- one round of work

    def decode(self) -> None:
        """One token for every running row."""
        self._shrink()
        for bucket in self._batches.buckets:
            if bucket.rows:
                self._step(bucket)
        for detached in self._batches.detach_outgrown():
            self._move(detached)

    def feed(self) -> None:
        """One chunk of one prompt; its rows join the batch after the last."""
        if not len(self._feeder):
            return
        prompt = self._feeder.next()
        if prompt.done < prompt.target and not self._feed_chunk(prompt):
            return
        if prompt.done >= prompt.target:
            self._feeder.discard(prompt)
            del self._admitted[prompt]
            copies = [deepcopy(prompt.caches) for _ in prompt.rows[1:]]
            for row, caches in zip(prompt.rows, [prompt.caches, *copies], strict=True):
                self._join(row, caches)

    def _feed_chunk(self, prompt: Prompt) -> bool:
        try:
            self._feeder.feed(prompt, busy=len(self._batches) > 0)
        except Exception as error:  # the model, mlx: anything. Only this prompt is lost.
            logger.exception("a prefill failed")
            self.fail(prompt.turn, error)
            return False
        if prompt.done in prompt.cuts:
            state = parking.state_tree(prompt.caches)
            prompt.turn.snapshots.append(Snapshot(prompt.done, state))
        self._send(prompt.turn, Prefill(prompt.done, len(prompt.tokens)))
        return True

    def _join(self, row: LiveRow, caches: Caches) -> None:
        row.entered = next(self._entries)
        self._batches.insert(row, caches)

    def _step(self, bucket: Bucket) -> None:
        try:
            steps = bucket.step()
        except Exception as error:  # as in _feed_chunk, but all rows of this batch are lost
            logger.exception("a decode step failed")
            for turn in dict.fromkeys(row.turn for row in bucket.reset()):
                self.fail(turn, error)
            return
        for step in steps:
            self._take(step)

    def _take(self, step: Step) -> None:
        row = step.row
        if row not in row.turn.rows:  # its turn failed through another row of this very step
            return
        # Its next token is sampled already, unless this was the last.
        num_sampled = len(row.emitted) + (step.finish is None)
        if row.guard.fault is not None and row.guard.spoils(num_sampled):
            self.fail(row.turn, row.guard.fault)
            return
        self.counters["generated_tokens"] += 1
        top = row.turn.generation.top_logprobs
        self._send(row.turn, token_event(row.index, step.token, step.logprobs, top))
        if step.finish is not None:
            self._end(row, step.finish, step.caches, step.num_cached)

    # ---- rows that change their place

    def _move(self, detached: Detached) -> None:
        """Into the bucket that its length belongs to now."""
        if (step := detached.step()) is not None:
            self._take(step)
        if detached.row in detached.row.turn.rows:
            self._batches.insert(detached.row, detached.caches)

    def _shrink(self) -> None:
        """Running rows have outgrown the budget: idle sessions go first, then the youngest row.

        One row per step at most, and none while a save is about to release memory.
        """
        missing = self._room.missing()
        if missing <= 0 or self._keeper.make_room(missing, None) or self._keeper.is_saving:
            return
        rows = [row for bucket in self._batches.buckets for row in bucket.rows.values()]
        if len(rows) + len(self._feeder) > 1 and rows:
            self._send_back(max(rows, key=lambda x: x.entered))

    def _send_back(self, row: LiveRow) -> None:
        self.counters["sent_back"] += 1
        (detached,) = self._batches.detach([row])
        if (step := detached.step()) is not None:
            self._take(step)
        if row in row.turn.rows:
            self._keep(row, detached.caches, detached.num_cached)
            tokens = np.array(row.tokens, np.int32)
            self._arrivals.come_back(Prompt(row.turn, [row], tokens))

    # ---- ends

    def stop(self, turn: Turn, index: int | None) -> None:
        """End one row, or all; their slots are free when this returns."""
        rows = [x for x in turn.rows if index is None or x.index == index]
        for detached in self._batches.detach(rows):
            self._end(detached.row, "cancelled", detached.caches, detached.num_cached)
        for prompt in self._arrivals.prompts:
            self._withdraw(prompt, rows)

    def stop_all(self) -> None:
        for turn in list(self._live):
            self.stop(turn, None)

    def forget(self, key: SessionKey) -> None:
        """Keep nothing of what this session has here, or is computing right now."""
        for turn in self._live:
            turn.forgotten = turn.forgotten or turn.key == key
        self._arrivals.forget(key)
        self._keeper.forget(key)

    def fail(self, turn: Turn, error: Exception) -> None:
        """End the whole turn and keep nothing of it."""
        self.counters["failed_turns"] += 1
        self._batches.detach(turn.rows)
        for prompt in self._arrivals.prompts:
            if prompt.turn is turn:
                self._arrivals.remove(prompt)
        turn.rows.clear()
        self._send(turn, Failed(f"{type(error).__name__}: {error}"))
        self._over(turn)

    def fail_all(self, error: Exception) -> None:
        """After a defect of this very module: nothing that runs can be trusted."""
        for bucket in self._batches.buckets:
            bucket.reset()
        for turn in list(self._live):
            self.fail(turn, error)

    def _withdraw(self, prompt: Prompt, rows: list[LiveRow]) -> None:
        leaving = [x for x in prompt.rows if x in rows]
        prompt.rows = [x for x in prompt.rows if x not in rows]
        if leaving and not prompt.rows:
            self._arrivals.remove(prompt)
        for row in leaving:
            # Rows that go on need these caches.
            caches = [] if prompt.rows else prompt.caches
            unchanged = prompt.saved if prompt.done == prompt.reused else None
            self._end(row, "cancelled", caches, prompt.done, unchanged)

    def _end(
        self,
        row: LiveRow,
        reason: FinishReason,
        caches: Caches,
        num_cached: int,
        unchanged: Future[bool] | None = None,
    ) -> None:
        row.turn.rows.remove(row)
        self._send(row.turn, Finished(row.index, reason))
        self._outbox.send()  # the client need not wait for what follows
        self._keep(row, caches, num_cached, unchanged)
        if not row.turn.rows:
            self._over(row.turn)

    def _keep(
        self,
        row: LiveRow,
        caches: Caches,
        num_cached: int,
        unchanged: Future[bool] | None = None,
    ) -> None:
        """The first row's KV becomes the session's; of the other rows nothing is kept."""
        turn, session = row.turn, row.turn.generation.session
        if session is None or row.index or turn.forgotten or not caches or not num_cached:
            return
        tokens = np.array(row.tokens[:num_cached], np.int32)
        try:
            self._keeper.keep(session, tokens, caches, turn.snapshots, unchanged, turn.lossy_tokens)
        except Exception:  # mlx, a defect: the answer is out, and its KV can be computed again
            logger.exception("the KV of a turn could not be kept")
            self._keeper.counters["keep_failures"] += 1
        turn.snapshots = []

    def _over(self, turn: Turn) -> None:
        del self._live[turn]
        turn.snapshots = []
        if (key := turn.key) and (session := turn.generation.session):
            self._keeper.hot.end_turn(key, len(turn.generation.prompt))
            if not turn.forgotten:
                self._tell("turn", session)

    def _send(self, turn: Turn, event: Event) -> None:
        self._outbox.put(turn.stream, event)
