"""From the line into the batch: admission, and where a prompt's KV comes from.

The longest beginning of the prompt that was computed before is reused: the session's own hot KV, a
hot session of the same tenant that begins alike (copied), or the cold store. The cold store is only
asked when the session's own hot KV does not already cover all there is.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from engines.mlx_worker.cold import Cold, Found, Question, Woken
from engines.mlx_worker.generation import Admitted, CacheOutcome
from engines.mlx_worker.hot import Candidate, take_apart
from engines.mlx_worker.keeping import Keeper, Tell, resolved
from engines.mlx_worker.layout import CachePlan
from engines.mlx_worker.prefill import Feeder
from engines.mlx_worker.room import Room
from engines.mlx_worker.stream import Outbox
from engines.mlx_worker.turn import Prompt, SessionKey, Turn
from engines.mlx_worker.waiting import FairLine, Places
from kvstore.records import MissReason, SessionRef
from kvstore.store import Restored

logger = logging.getLogger(__name__)

# With a hot beginning at hand, the cold store must add at least so many tokens to be worth it.
WORTH_A_RESTORE = 64
# How long a prompt that could run alone waits for saves to release memory.
SAVE_WAIT_S = 10.0
# Snapshots of untrimmable state that one turn takes on its way through the prompt.
MAX_CUTS = 4


@dataclass
class Waking:
    """A prefetch that is under way."""

    joining: list[Prompt] = field(default_factory=list)  # turns that wait for it
    forgotten: bool = False  # the session was deleted meanwhile: what comes is not wanted


class Arrivals:
    """Belongs to the owner thread."""

    def __init__(
        self,
        model: Any,
        plan: CachePlan,
        cold: Cold | None,
        keeper: Keeper,
        room: Room,
        feeder: Feeder,
        admitted: dict[Prompt, None],
        places: Places,
        outbox: Outbox,
        post: Callable[[Callable[[], None]], None],
        tell: Tell,
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._plan = plan
        self._cold = cold
        self._keeper = keeper
        self._room = room
        self._feeder = feeder
        self._admitted = admitted
        self._places = places
        self._outbox = outbox
        self._post = post
        self._tell = tell
        self._clock = clock
        self._line: FairLine[Prompt] = FairLine()
        self._looking: dict[Prompt, Candidate | None] = {}  # the cold store is being asked
        self._waking: dict[SessionKey, Waking] = {}
        self._blocked_since_s: float | None = None
        self.counters: Counter[str] = Counter()

    # ---- the line

    def __len__(self) -> int:
        return len(self._line)

    @property
    def prompts(self) -> list[Prompt]:
        """All that do not decode yet, wherever they are."""
        joining = [x for waking in self._waking.values() for x in waking.joining]
        return [*self._line.items(), *joining, *self._admitted]

    def arrive(self, prompt: Prompt) -> None:
        key = prompt.turn.key
        if key in self._waking:
            self._waking[key].joining.append(prompt)
        else:
            tenant, session = key or ("", "")
            self._line.push(prompt, tenant, session)

    def come_back(self, prompt: Prompt) -> None:
        """A row that had to leave its batch; it is the next to enter one."""
        self._line.push_first(prompt)

    def remove(self, prompt: Prompt) -> None:
        """Its rows are all gone."""
        self._leave_line(prompt.turn)
        self._line.remove(prompt)
        for waking in self._waking.values():
            if prompt in waking.joining:
                waking.joining.remove(prompt)
        self._looking.pop(prompt, None)
        self._feeder.discard(prompt)
        self._admitted.pop(prompt, None)

    def _leave_line(self, turn: Turn) -> None:
        if turn.in_line:
            turn.in_line = False
            self._places.leave(turn.tenant)

    # ---- admission

    def admit(self) -> None:
        while (prompt := self._line.head()) is not None and self._may_enter(prompt):
            self._blocked_since_s = None
            self._line.pop()
            self._leave_line(prompt.turn)
            self._admitted[prompt] = None
            self._begin(prompt)

    def _may_enter(self, prompt: Prompt) -> bool:
        own = prompt.turn.key
        if not self._room.has_slots(len(prompt.rows)):
            return False
        missing = self._room.missing_for(prompt, own)
        if missing <= 0 or self._keeper.make_room(missing, own):
            return True
        if self._admitted or self._room.num_rows:
            return False
        # Nothing else runs: it fits once everything idle is gone, which only waits for saves.
        now = self._clock()
        since = self._blocked_since_s = self._blocked_since_s or now
        return self._keeper.drop_all(own, at_any_price=now - since > SAVE_WAIT_S)

    # ---- where the KV comes from

    def _begin(self, prompt: Prompt) -> None:
        session = prompt.turn.generation.session
        if session is None:
            self._start(prompt, CacheOutcome("miss", 0, "never-stored"))
            return
        had_own = self._keeper.hot.get((session.tenant, session.id)) is not None
        hot = self._keeper.borrow(session, prompt.tokens, prompt.target)
        if hot is not None:
            prompt.caches, prompt.saved = take_apart(hot), hot.hot.saved
            prompt.done = prompt.reused = hot.num_tokens
            _note_lossy(prompt.turn, min(hot.hot.lossy_tokens, hot.num_tokens))
        if self._cold is None:
            missed: MissReason = "diverged" if had_own else "disabled"
            self._start(prompt, _outcome(prompt, hot, None if hot else missed))
        elif _is_enough(prompt, hot):
            self._start(prompt, _outcome(prompt, hot, None))
        else:
            self._looking[prompt] = hot
            question = Question(
                session,
                prompt.tokens,
                limit=prompt.target,
                boundaries=[*prompt.turn.generation.boundaries, prompt.target],
                at_least=prompt.done + (WORTH_A_RESTORE if prompt.done else 1),
            )
            self._cold.ask(question, lambda x: self._post(lambda: self._found(prompt, x)))

    def _found(self, prompt: Prompt, found: Found) -> None:
        if prompt not in self._looking:  # cancelled meanwhile
            return
        hot = self._looking.pop(prompt)
        outcome = self._use_cold(prompt, found)
        self._start(prompt, outcome or _outcome(prompt, hot, found.reason))

    def _use_cold(self, prompt: Prompt, found: Found) -> CacheOutcome | None:
        if self._cold is None or found.restored is None or found.tier is None:
            return None
        try:
            prompt.caches = self._cold.rebuild(found.restored)
        except Exception:  # whatever is wrong with the pieces, prefill is right
            logger.exception("a restored session could not be used")
            self.counters["rebuild_failures"] += 1
            return None
        prompt.done = prompt.reused = found.num_tokens
        prompt.saved = resolved(True)
        _note_lossy(prompt.turn, found.restored.lossy_tokens)
        if session := prompt.turn.generation.session:
            self._came_back(session)
        return CacheOutcome(_COLD[found.tier], found.num_tokens, found.reason)

    def _start(self, prompt: Prompt, outcome: CacheOutcome) -> None:
        if not prompt.caches:
            prompt.caches = make_prompt_cache(self._model)
        if self._plan.needs_state and prompt.turn.generation.session is not None:
            prompt.cuts = cuts(prompt)
        self._count(prompt, outcome)
        if not prompt.turn.admitted:
            prompt.turn.admitted = True
            self._outbox.put(prompt.turn.stream, Admitted(outcome))
        self._feeder.add(prompt)

    def _count(self, prompt: Prompt, outcome: CacheOutcome) -> None:
        self.counters["prompts"] += 1
        self.counters["prompt_tokens"] += len(prompt.tokens)
        self.counters["cached_tokens"] += outcome.cached_tokens
        self.counters[f"source.{outcome.source}"] += 1
        if outcome.reason:
            self.counters[f"misses.{outcome.reason}"] += 1

    # ---- prefetch

    def wake(self, session: SessionRef, done: Callable[[], None]) -> bool:
        """Make a session hot; then ``done`` is called on this thread. False: nothing to do."""
        key = (session.tenant, session.id)
        hot = self._keeper.hot
        if self._cold is None or key in self._waking or hot.get(key) or hot.is_busy(key):
            return False
        self._waking[key] = Waking()
        self._cold.wake(
            session, lambda woken: self._post(lambda: self._woken(session, woken, done))
        )
        return True

    def forget(self, key: SessionKey) -> None:
        """What a prefetch of this session brings is not kept."""
        if (waking := self._waking.get(key)) is not None:
            waking.forgotten = True

    def _woken(self, session: SessionRef, woken: Woken, done: Callable[[], None]) -> None:
        waking = self._waking.pop((session.tenant, session.id))
        try:
            if woken is not None and not waking.forgotten:
                self._settle_woken(session, woken)
        finally:  # whatever happened, the turns that waited for it go on
            for prompt in waking.joining:
                self.arrive(prompt)
            done()

    def _settle_woken(self, session: SessionRef, restored: Restored) -> None:
        missing = self._room.missing() + self._room.row_bytes(restored.num_tokens)
        if self._cold is None or (missing > 0 and not self._keeper.make_room(missing, None)):
            return
        try:
            caches = self._cold.rebuild(restored)
            self._keeper.keep(
                session,
                restored.tokens,
                caches,
                saved=resolved(True),
                lossy_tokens=restored.lossy_tokens,
            )
        except Exception:  # as in _use_cold
            logger.exception("a restored session could not be used")
            self.counters["rebuild_failures"] += 1
            return
        self._came_back(session)

    def _came_back(self, session: SessionRef) -> None:
        # Perhaps by an engine before this one. As of now: it may have been let go meanwhile.
        if self._cold is not None and self._cold.store.is_pinned(session):
            self._keeper.hot.pin((session.tenant, session.id), True)
        self._tell("restored", session)


_COLD: dict[str, Any] = {"ram": "cold-ram", "disk": "cold-disk", "redis": "cold-redis"}


def cuts(prompt: Prompt) -> list[int]:
    """Where to take snapshots on the way: the first boundary (a system prompt, which other sessions
    share), the last ones, and the end of what is fed before decoding."""
    inside = {x for x in prompt.turn.generation.boundaries if prompt.done < x < prompt.target}
    positions = sorted({*inside, prompt.target} if prompt.target > prompt.done else inside)
    surplus = len(positions) - MAX_CUTS
    return positions if surplus <= 0 else [positions[0], *positions[1 + surplus :]]


def _is_enough(prompt: Prompt, hot: Candidate | None) -> bool:
    """Nobody can add anything worth a restore to this hot beginning."""
    if hot is None:
        return prompt.target == 0
    whole = hot.own and not hot.diverged
    return whole or prompt.target - hot.num_tokens < WORTH_A_RESTORE


def _outcome(prompt: Prompt, hot: Candidate | None, reason: MissReason | None) -> CacheOutcome:
    """Of a prompt that starts from hot KV, or from nothing."""
    if hot is None:
        return CacheOutcome("miss", 0, reason)
    if hot.num_tokens == prompt.target or reason == "never-stored":
        reason = None
    elif hot.diverged:
        reason = "diverged"
    return CacheOutcome("hot", hot.num_tokens, reason)


def _note_lossy(turn: Turn, num_tokens: int) -> None:
    turn.lossy_tokens = max(turn.lossy_tokens, num_tokens)
