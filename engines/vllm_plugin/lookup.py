"""The half beside vLLM's scheduler: which tokens of a request need not be prefilled.

A request goes through here like this (``->`` are calls of vLLM's, on its own thread):

    -> add                 whose turn it is
    -> match  None         too much is staged for others already; it waits in line
    -> match  None         the ranks were asked to stage what is stored: read it, verify it; if
                           nothing else runs, memory is quick enough to answer at once
    -> match  None         still reading (a disk, Redis); vLLM serves others meanwhile
    -> match  n tokens     everything offered is in memory and verified on every rank
    -> allocated           vLLM set blocks aside; the load is planned
    -> absorb              loaded, or blocks that could not be decoded
    -> finished            the turn is over; its full blocks are saved

A failed load must not be offered again. With the policy ``recompute``, a request whose first block
failed starts over from nothing, and vLLM asks ``match`` again; the same answer would fail the same
way, for ever. So a request gets one load, and after a failure none.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final

from engines.vllm_plugin.groups import DENSE, Groups
from engines.vllm_plugin.hot import HotSessions
from engines.vllm_plugin.identity import mark_of, session_of
from engines.vllm_plugin.messages import Release, Stage
from engines.vllm_plugin.parts import ids_between, num_common
from engines.vllm_plugin.peeks import Peeks
from engines.vllm_plugin.plan import Load, Save, Step
from engines.vllm_plugin.postponed import Postponed
from engines.vllm_plugin.ranks import Ranks
from engines.vllm_plugin.staging_room import StagingRoom
from engines.vllm_plugin.turn import Restore, Turn, Unacked, num_final
from kvstore.records import SessionRef, TierName
from kvstore.stats import Counters

# A rank answers within its own deadline; one that does not answer at all is not waited for.
RANK_GRACE_S: Final = 2.0
# While the model has nothing to do, vLLM steps on and on until a load or a save is done, in every
# process, on the cores that this very work needs. So each step waits for news: no longer than
# this, because a new request is taken up only between two steps.
PATIENCE_S: Final = 0.01


class Lookup:
    """All methods on vLLM's thread."""

    def __init__(
        self,
        ranks: Ranks,
        hot: HotSessions,
        *,
        block_tokens: int,
        groups: Groups = DENSE,
        parts: bool = False,
        num_ranks: int,
        deadline_s: float,
        max_staged_bytes: int,
        on_admitted: Callable[[str, str], None],
        on_turn_end: Callable[[SessionRef], None],
        counters: Counters,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """``on_admitted`` gets a request's mark and the value of its cache header.

        ``max_staged_bytes``: packed, on all ranks together. ``parts``: keep and restore tokens
        behind the last full block, too.
        """
        self._ranks = ranks
        self._hot = hot
        self._block_tokens = block_tokens
        self._groups = groups
        self._parts = parts
        self._num_ranks = num_ranks
        self._deadline_s = deadline_s + RANK_GRACE_S
        self._room = StagingRoom(max_staged_bytes)
        self._on_admitted = on_admitted
        self._on_turn_end = on_turn_end
        self._counters = counters
        self._monotonic = monotonic
        self._turns: dict[str, Turn] = {}
        self._loading: dict[str, set[int]] = {}
        self._tickets = itertools.count(1)
        self._peeks = Peeks(ranks, self._tickets)
        self._jobs = itertools.count(1)
        self._unacked: dict[int, Unacked] = {}  # by job
        self._postponed = Postponed(hot, groups)
        self._plan = Step()
        self._num_running = 0
        self._was_patient = False  # in this step

    # ---- a request comes

    def add(self, request: Any) -> None:
        self._hot.drop_asked()
        session = session_of(request)
        self._turns[request.request_id] = Turn(
            request, session, barred=request.lora_request is not None
        )
        if session is not None:
            self._hot.begin(session)

    def match(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See ``get_num_new_matched_tokens``. Asking twice changes nothing."""
        turn = self._turns.get(request.request_id)
        if turn is None or turn.barred or request.skip_reading_prefix_cache:
            return 0, False
        first = num_computed_tokens // self._block_tokens
        # One token at least must be computed, or there would be nothing to sample from.
        last = min((request.num_tokens - 1) // self._block_tokens, len(request.block_hashes))
        if not (first < last or self._is_hot_part(turn, first)) or not self._ranks.ready:
            self._release(turn)
            return 0, False
        if turn.restore is not None and first < turn.restore.first_block:
            self._release(turn)
        hashes = request.block_hashes[: max(first, last)]
        restore = turn.restore or self._stage(turn, first, hashes)
        if restore is None:
            return self._without_room(turn, first, hashes)
        if not self._has_answer(turn, restore):
            return None, False
        return self._offer(turn, first)

    def _is_hot_part(self, turn: Turn, first: int) -> bool:
        """vLLM has all full blocks of the session, and the prompt goes on as the session does.

        Worth a load while nobody else makes it wait for a step of the model.
        """
        if not self._parts or self._num_running or turn.session is None or not first:
            return False
        part = self._hot.part_behind(
            turn.session, first, bytes(turn.request.block_hashes[first - 1])
        )
        return self._part_tokens(turn.request, first, part) > 0

    def _part_tokens(self, request: Any, block: int, part: Sequence[int]) -> int:
        if not self._parts:
            return 0
        return num_common(part, request, block * self._block_tokens, request.num_tokens - 1)

    def _stage(self, turn: Turn, first: int, hashes: Sequence[bytes]) -> Restore | None:
        """None while there is no room."""
        num_tokens = (len(hashes) - first) * self._block_tokens
        nbytes = num_tokens * self._ranks.packed_bytes_per_token
        if not self._room.enter(turn.request.request_id, nbytes):
            return None
        self._peeks.take_back(turn)
        ticket = next(self._tickets)
        turn.restore = Restore(ticket, first, self._monotonic())
        self._ranks.send(Stage(ticket, turn.session, first, b"".join(map(bytes, hashes))))
        return turn.restore

    def _without_room(
        self, turn: Turn, first: int, hashes: Sequence[bytes]
    ) -> tuple[int | None, bool]:
        """Who has nothing to read need not wait for it."""
        if not self._peeks.finds_nothing(turn, first, hashes):
            return None, False
        turn.barred = True
        self._release(turn)
        return 0, False

    def _has_answer(self, turn: Turn, restore: Restore) -> bool:
        """True also once it is not waited for any longer."""
        if restore.staged is not None:
            return True
        restore.staged = self._ranks.staged(restore.ticket, self._patience_s())
        if restore.staged is None and self._monotonic() - restore.asked_at < self._deadline_s:
            return False
        turn.reason = restore.staged.reason if restore.staged else "deadline"
        return True

    def _patience_s(self) -> float:
        """Once per step: many requests may ask in one."""
        patient = not self._num_running and not self._was_patient
        self._was_patient = True
        return PATIENCE_S if patient else 0.0

    def _offer(self, turn: Turn, first: int) -> tuple[int, bool]:
        staged = turn.restore.staged if turn.restore else None
        offered = 0
        if staged is not None and staged.end_block >= first:
            offered = (staged.end_block - first) * self._block_tokens
            offered += self._part_tokens(turn.request, staged.end_block, staged.part)
        if not offered:
            self._release(turn)
            turn.barred = True
        return offered, offered > 0

    def _release(self, turn: Turn) -> None:
        if turn.restore is not None and not turn.restore.loading:
            self._ranks.send(Release(turn.restore.ticket))
        self._peeks.take_back(turn)
        turn.restore = None
        self._room.leave(turn.request.request_id)

    def allocated(
        self, request: Any, tables: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """``tables``: the request's blocks, by group."""
        turn = self._turns.get(request.request_id)
        if turn is None or turn.restore is None or turn.restore.loading:
            return
        if not num_external_tokens:
            self._release(turn)
            return
        restore, staged = turn.restore, turn.restore.staged
        assert staged is not None, "vLLM loads only what was offered"
        num_blocks, part_tokens = divmod(num_external_tokens, self._block_tokens)
        first = staged.end_block - num_blocks
        ids = list(tables[self._groups.full][first : staged.end_block + bool(part_tokens)])
        state = self._groups.state_blocks(tables, staged.end_block, first)
        load = Load(restore.ticket, request.request_id, first, ids, state, part_tokens)
        self._plan.loads.append(load)
        restore.loading = set(ids)
        self._loading[request.request_id] = restore.loading
        turn.restored_tokens, turn.tier = num_external_tokens, staged.tier
        turn.only_part = not num_blocks

    # ---- a step

    def take_step(self, admitted: Iterable[tuple[str, int]]) -> Step:
        """``admitted``: requests that begin to run with this step, and their computed tokens."""
        self._hot.drop_asked()
        for request_id, num_computed_tokens in admitted:
            self._report(request_id, num_computed_tokens)
        self._make_up()
        step, self._plan = self._plan, Step()
        step.patience_s = 0.0 if self._num_running else PATIENCE_S
        self._was_patient = False
        return step

    def _report(self, request_id: str, num_computed_tokens: int) -> None:
        turn = self._turns.get(request_id)
        if turn is None or turn.reported:
            return
        turn.reported = True
        self._num_running += 1
        self._count(turn, num_computed_tokens)
        mark = mark_of(request_id)
        if mark is not None:
            self._on_admitted(mark, turn.cache_header(num_computed_tokens))

    def _count(self, turn: Turn, num_computed_tokens: int) -> None:
        """By the names that the mlx engine gives them."""
        source, reason = turn.outcome(num_computed_tokens)
        self._counters.add("prompts")
        self._counters.add("prompt_tokens", turn.request.num_tokens)
        self._counters.add("cached_tokens", num_computed_tokens)
        self._counters.add(f"source.{source}")
        if reason:
            self._counters.add(f"misses.{reason}")

    def absorb(
        self,
        bad_block_ids: set[int],
        loaded: Iterable[str],
        acks: dict[int, int],
        failed: Collection[str] = (),
        skipped: Collection[int] = (),
    ) -> None:
        """``failed``: requests whose load failed, where vLLM takes no failed blocks.

        ``skipped``: which of the acknowledged saves found too many others waiting.
        """
        for request_id, block_ids in self._loading.items():
            if block_ids & bad_block_ids or request_id in failed:
                self._failed(request_id)
        for request_id in loaded:
            self._loaded(request_id)
        for job in skipped:
            self._unacked[job].is_skipped = True
        for job, ranks in acks.items():
            self._acked(job, ranks)

    def _failed(self, request_id: str) -> None:
        self._counters.add("loads_failed")
        turn = self._turns.get(request_id)
        if turn is not None:
            turn.barred = turn.failed = True
            turn.reason = "corrupt"

    def _loaded(self, request_id: str) -> None:
        self._loading.pop(request_id, None)
        self._room.leave(request_id)
        turn = self._turns.get(request_id)
        if turn is None:
            return
        turn.restore = None
        if not turn.failed:
            self._counters.add("restores")
            self._counters.add("restored_tokens", turn.restored_tokens)
            self._counters.add(f"restored_tokens.{turn.tier}", turn.restored_tokens)

    # ---- the turn ends

    def finished(self, request: Any, tables: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """Plan the save. Returns what goes to the client's side with the answer."""
        block_ids = tables[self._groups.full]
        turn = self._turns.pop(request.request_id, None)
        if turn is None:
            return None
        self._num_running -= turn.reported
        hashes: list[bytes] = []
        # While a load runs, or before one was planned, the blocks may hold anything.
        if request.request_id not in self._loading:
            self._release(turn)
            hashes = self._full_hashes(request, len(block_ids))
        if turn.session is not None:
            part = self._part(request, len(hashes), len(block_ids))
            states = self._held_states(request, hashes)
            if hashes:
                self._postponed.remove(turn.session)
                ids = list(block_ids[: len(hashes) + bool(part)])
                self._save(Save(next(self._jobs), turn.session, hashes, ids, states, part))
            boundary = max(states, default=0) if self._groups.states else None
            self._hot.end(turn.session, hashes, part, boundary)
            self._on_turn_end(turn.session)
        return {
            "restored_tokens": 0 if turn.failed else turn.restored_tokens,
            "tier": turn.tier,
            "reason": turn.reason,
        }

    def _full_hashes(self, request: Any, num_blocks: int) -> list[bytes]:
        """Of blocks whose every token was computed; a step in flight does not count."""
        full = min(num_final(request) // self._block_tokens, len(request.block_hashes), num_blocks)
        return [bytes(x) for x in request.block_hashes[: max(full, 0)]]

    def _part(self, request: Any, num_full: int, num_blocks: int) -> tuple[int, ...]:
        """Ids of what was computed behind so many full blocks."""
        first, last = num_full * self._block_tokens, num_final(request)
        if not (self._parts and 0 < num_full < num_blocks and last - first < self._block_tokens):
            return ()
        return ids_between(request, first, last)

    def _held_states(self, request: Any, hashes: Sequence[bytes]) -> dict[int, list[int]]:
        if not self._groups.states:
            return {}
        prompt = min((request.num_prompt_tokens - 1) // self._block_tokens, len(hashes))
        return self._groups.states_to_keep(self._hot.pool, hashes, prompt)

    def _save(self, save: Save) -> None:
        held = save.held_ids
        self._hot.pool.touch([self._hot.pool.blocks[x] for x in held])
        self._unacked[save.job] = Unacked(save.session, held, self._num_ranks)
        self._hot.count_save(save.session, +1)
        self._plan.saves.append(save)

    def _acked(self, job: int, ranks: int) -> None:
        save = self._unacked[job]
        save.num_ranks -= ranks
        if save.num_ranks > 0:
            return
        del self._unacked[job]
        if save.is_skipped:
            self._postponed.add(save.session)
        self._hot.count_save(save.session, -1)
        # Tail first: vLLM takes back what was freed first, and a prefix is of use to more requests.
        self._hot.pool.free_blocks([self._hot.pool.blocks[x] for x in reversed(save.block_ids)])

    def _make_up(self) -> None:
        """For a save that was skipped, once no other waits for its blocks to be copied."""
        if self._unacked or not self._postponed:
            return
        save = self._postponed.next_save(next(self._jobs))
        if save is not None:
            self._save(save)
            self._postponed.remove(save.session)

    @property
    def has_work(self) -> bool:
        """An idle engine runs no code of ours, so it must go on stepping until saves are done."""
        return bool(self._unacked or self._plan.saves or self._plan.loads or self._postponed)

    def tier_of(self, request: Any) -> TierName | None:
        """Where the tokens come from that are being loaded for this request."""
        turn = self._turns.get(request.request_id)
        return turn.tier if turn else None

    @property
    def num_running(self) -> int:
        """Requests that vLLM has begun to compute."""
        return self._num_running

    @property
    def num_waiting(self) -> int:
        return max(0, len(self._turns) - self._num_running)

    @property
    def is_settled(self) -> bool:
        """Nothing is held for anybody; for tests."""
        return not (self._turns or self._loading or self.has_work)
