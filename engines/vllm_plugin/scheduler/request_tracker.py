"""Follows each request on vLLM's scheduler side: which of its tokens need not be prefilled.

The stages of a request (``->`` marks calls by vLLM, on its own thread):

    -> add                 finds the request's session
    -> match  None         too much is staged for other requests already; the request waits
    -> match  None         the ranks were asked to stage the stored blobs: to read and verify them;
                           if no other request runs, blobs in memory are staged within this call
    -> match  None         still reading (a disk, Redis); vLLM serves other requests meanwhile
    -> match  None         a running request will compute more of it: see ``shared_prefills``
    -> match  n tokens     all offered tokens are in memory and verified on every rank
    -> allocated           vLLM set blocks aside; the load is planned
    -> absorb              the load has ended, perhaps with blocks that could not be decoded
    -> finished            the turn is over; its full chunks are saved

A failed load must not be offered again. With the policy ``recompute``, a request whose first block
failed starts again from the beginning, and vLLM calls ``match`` again; the same answer would fail
the same way, for ever. So a request gets one load at a time, and none after a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from engines.vllm_plugin.identity import answer_id_of, session_of
from engines.vllm_plugin.messages import RequestAdmitted
from engines.vllm_plugin.plan import StepWork
from engines.vllm_plugin.scheduler.measured_requests import MeasuredRequests
from engines.vllm_plugin.scheduler.resident_sessions import ResidentSessions
from engines.vllm_plugin.scheduler.restores import IDLE_WAIT_S, Restores
from engines.vllm_plugin.scheduler.shared_prefills import PrefillsInFlight
from engines.vllm_plugin.scheduler.tracked_request import Restoring, TrackedRequest
from engines.vllm_plugin.scheduler.turn_saves import TurnSaves
from engines.wire import RequestProgress
from kvstore.session import SessionRef, TierName
from kvstore.stats import Counters


class RequestTracker:
    """The requests that vLLM has, and the planned work for them. All methods on vLLM's thread."""

    def __init__(
        self,
        restores: Restores,
        shared: PrefillsInFlight,
        saves: TurnSaves,
        resident: ResidentSessions,
        measured: MeasuredRequests,
        *,
        on_admitted: Callable[[RequestAdmitted], None],
        on_turn_end: Callable[[SessionRef], None],
        counters: Counters,
    ) -> None:
        """``on_admitted`` is called for each request that begins to run."""
        self._restores = restores
        self._shared = shared
        self._saves = saves
        self._resident = resident
        self._measured = measured
        self._on_admitted = on_admitted
        self._on_turn_end = on_turn_end
        self._counters = counters
        self._requests: dict[str, TrackedRequest] = {}
        self._num_running = 0

    # ---- a request arrives

    def add(self, request: Any) -> None:
        """Note a new request (``vllm.v1.request.Request``) and begin its session's turn."""
        self._resident.drop_asked()
        if self._measured.add(request):
            return
        session = session_of(request)
        restoring = Restoring.OPEN if request.lora_request is None else Restoring.OVER
        self._requests[request.request_id] = TrackedRequest(
            request, session, why_none=self._resident.why_none(session), restoring=restoring
        )
        if session is not None:
            self._resident.begin(session)

    def match(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Answer vLLM's ``get_num_new_matched_tokens``: see ``Restores.match``.

        If the number is None, vLLM asks again in its next step.
        """
        if request.request_id in self._measured:
            given = self._measured.num_given(request, num_computed_tokens)
            return given, given > 0
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return 0, False
        if self._shared.is_held_back(tracked, num_computed_tokens):
            return None, False
        idle = not self._num_running
        offered, is_async = self._restores.match(tracked, num_computed_tokens, idle=idle)
        # What is stored may reach beyond what the other request computes.
        if offered is not None and self._shared.holds_back(tracked, num_computed_tokens + offered):
            self._restores.release(tracked)
            return None, False
        return offered, is_async

    def allocated(
        self, request: Any, tables: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """Plan the load of ``num_external_tokens``; ``tables``: the request's blocks, by group."""
        self._measured.allocated(request, tables, num_external_tokens)
        tracked = self._requests.get(request.request_id)
        if tracked is not None:
            self._restores.plan_load(tracked, tables, num_external_tokens)
            self._shared.begin(request)

    # ---- a step

    def take_step(
        self, admitted: Iterable[tuple[str, int]], scheduled: Collection[str]
    ) -> StepWork:
        """The saves and loads for the workers to begin in the next step.

        Args:
            admitted: ids of the requests that begin to run in it, and their computed tokens.
            scheduled: ids of all requests for which it computes tokens.
        """
        self._resident.drop_asked()
        self._shared.forget_computed()
        for request_id, num_computed_tokens in admitted:
            self._report(request_id, num_computed_tokens)
        wait_s = 0.0 if self._num_running else IDLE_WAIT_S
        given, wanted = self._measured.pop_planned()
        alone = self._measured.alone_in(scheduled)
        saves, loads = self._saves.pop_planned(), self._restores.pop_planned()
        return StepWork(saves, loads, given, wanted, alone, wait_s)

    def _report(self, request_id: str, num_computed_tokens: int) -> None:
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.reported:
            return
        tracked.reported = True
        self._num_running += 1
        outcome, num_tokens = tracked.outcome(num_computed_tokens), tracked.request.num_tokens
        # Counted under the same names as by the mlx engine.
        self._counters.add("prompts")
        self._counters.add("prompt_tokens", num_tokens)
        self._counters.add("cached_tokens", num_computed_tokens)
        self._counters.add(f"source.{outcome.source}")
        if outcome.reason:
            self._counters.add(f"misses.{outcome.reason}")
        answer_id = answer_id_of(request_id)
        if answer_id is not None:
            self._on_admitted(RequestAdmitted(answer_id, outcome.header(), num_tokens))

    def absorb(
        self,
        bad_block_ids: set[int],
        loaded: Iterable[str],
        acks: Mapping[int, int],
        failed: Collection[str],
        skipped: Collection[int],
    ) -> None:
        """Process the workers' reports at the end of a step.

        ``failed``: requests whose load failed, where vLLM accepts no list of failed blocks.
        ``acks`` and ``skipped``: see ``TurnSaves.acknowledge``.
        """
        for request_id in self._restores.failed_loads(bad_block_ids, failed):
            self._counters.add("loads_failed")
            if (tracked := self._requests.get(request_id)) is not None:
                tracked.restoring, tracked.reason = Restoring.FAILED, "corrupt"
        for request_id in loaded:
            self._end_load(request_id)
        self._saves.acknowledge(acks, skipped)

    def _end_load(self, request_id: str) -> None:
        self._restores.end_load(request_id)
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        tracked.restore = None
        if tracked.restoring is not Restoring.FAILED:
            self._counters.add("restores")
            self._counters.add("restored_tokens", tracked.restored_tokens)
            self._counters.add(f"restored_tokens.{tracked.tier}", tracked.restored_tokens)

    # ---- the turn ends

    def finished(self, request: Any, tables: Sequence[Sequence[int]]) -> TrackedRequest | None:
        """Plan the save of a request that has ended, and forget the request.

        ``tables``: its blocks, by group. Returns None if the request is not known.
        """
        self._measured.finished(request, tables)
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return None
        self._num_running -= tracked.reported
        self._shared.end(request.request_id)
        # While a load is planned or runs, the contents of the blocks are undefined.
        is_loading = self._restores.is_loading(request.request_id)
        if not is_loading:
            self._restores.release(tracked)
        if tracked.session is not None:
            self._saves.end_turn(request, tracked.session, tables, filled=not is_loading)
            self._on_turn_end(tracked.session)
        return tracked

    @property
    def has_work(self) -> bool:
        """True while saves or loads need more steps: an idle engine runs no code of ours."""
        return self._saves.has_work or self._restores.has_planned

    def tier_of(self, request: Any) -> TierName | None:
        """The tier of the tokens that are loaded for this request."""
        tracked = self._requests.get(request.request_id)
        return tracked.tier if tracked else None

    def progress(self) -> list[RequestProgress]:
        """The progress of the running requests that belong to sessions. Any thread."""
        return [
            x.progress(x.session)
            for x in list(self._requests.values())
            if x.reported and x.session is not None
        ]

    @property
    def num_running(self) -> int:
        """The number of requests that vLLM has begun to compute."""
        return self._num_running

    @property
    def num_held_back(self) -> int:
        """The number of requests that wait until a running one has computed their beginning."""
        return self._shared.num_held_back

    @property
    def num_requests(self) -> int:
        """The number of requests that vLLM has; measuring requests do not count."""
        return len(self._requests)

    @property
    def num_waiting(self) -> int:
        return max(0, len(self._requests) - self._num_running)

    @property
    def is_settled(self) -> bool:
        """True if no request, load or save is left; for tests."""
        return not (self._requests or self.has_work) and self._restores.is_settled
