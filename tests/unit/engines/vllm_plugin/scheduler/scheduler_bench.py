"""A ``RequestTracker`` with a block pool and ranks that a test can read."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from engines.vllm_plugin.groups import DENSE, Groups
from engines.vllm_plugin.messages import Forward, Release, Stage, Staged
from engines.vllm_plugin.plan import Save
from engines.vllm_plugin.scheduler.measured_requests import MeasuredRequests
from engines.vllm_plugin.scheduler.request_tracker import RequestTracker
from engines.vllm_plugin.scheduler.resident_sessions import ResidentSessions
from engines.vllm_plugin.scheduler.restores import Restores
from engines.vllm_plugin.scheduler.shared_prefills import PrefillsInFlight
from engines.vllm_plugin.scheduler.tracked_request import TokenBlocks
from engines.vllm_plugin.scheduler.turn_saves import TurnSaves
from kvstore.session import SessionRef
from kvstore.stats import Counters
from tests.block_sessions import BLOCK, hashes, tokens_of

PROMPT = tokens_of(10, 2)  # ten blocks, which are five chunks, and two tokens
STEP = 12 * BLOCK


@dataclass
class Block:
    block_id: int
    ref_cnt: int = 0


class Pool:
    """vLLM's block pool, as far as the plug-in touches it."""

    def __init__(self) -> None:
        self.num_gpu_blocks = 100
        self.blocks = [Block(i) for i in range(100)]
        self.cached: dict[bytes, Block] = {}

    def get_cached_block(self, block_hash: bytes, groups: list[int]) -> list[Block] | None:
        found = self.cached.get(block_hash)
        return [found] if found else None

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        self.freed = [x.block_id for x in blocks]
        for block_id in self.freed:
            self.blocks[block_id].ref_cnt -= 1

    def evict_blocks(self, block_ids: set[int]) -> None:
        self.cached = {h: x for h, x in self.cached.items() if x.block_id not in block_ids}

    def get_num_free_blocks(self) -> int:
        return 99 - sum(x.ref_cnt > 0 for x in self.blocks)

    def fill(self, chain: list[bytes]) -> list[int]:
        """Put this chain into blocks from the tenth on; those that are there already are shared."""
        for block_hash in chain:
            self.cached.setdefault(block_hash, self.blocks[10 + len(self.cached)])
        return [self.cached[x].block_id for x in chain]


@dataclass
class Asked:
    """The way to the ranks; a test answers for them."""

    ready: bool = True
    packed_bytes_per_token: int = 1
    sent: list[Stage | Release] = field(default_factory=list)
    answers: dict[int, Staged] = field(default_factory=dict)
    patience: list[float] = field(default_factory=list)

    def send(self, message: Stage | Release) -> None:
        self.sent.append(message)

    def staged(self, ticket: int, within_s: float = 0.0) -> Staged | None:
        self.patience.append(within_s)
        return self.answers.pop(ticket, None)

    def answer(self, end_block: int, tier="ram", reason=None) -> None:
        stage = next(x for x in reversed(self.sent) if isinstance(x, Stage))
        self.answers[stage.ticket] = Staged(stage.ticket, end_block, tier, reason)


class Status(Enum):
    """Those of vLLM's states that a request has before it ends."""

    WAITING = 1
    WAITING_FOR_REMOTE_KVS = 2
    RUNNING = 3
    PREEMPTED = 4


class Request:
    """vLLM's request, as far as the plug-in reads it."""

    def __init__(self, tokens: list[int], name: str = "r1", session: str = "s", **fields: Any):
        self.request_id = name
        self.num_tokens = self.num_prompt_tokens = len(tokens)
        self.all_token_ids = tokens
        self.mm_features: list[Any] = []
        self.prompt_embeds = None
        self.block_hashes = hashes(tokens)
        self.kv_transfer_params = {"thermocline": {"tenant": "t", "session": session}}
        self.session_id = None
        self.cache_salt = "ab"
        self.lora_request = None
        self.skip_reading_prefix_cache = False
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.status = Status.WAITING
        for key, value in fields.items():
            setattr(self, key, value)


@dataclass
class Bench:
    tracker: RequestTracker
    ranks: Asked
    hot: ResidentSessions
    pool: Pool
    now: list[float]
    admitted: list[tuple[str, str]]
    ended: list[SessionRef]
    counters: Counters
    orders: dict[str, Forward]  # of measurements, by ticket

    def add(self, tokens: list[int] = PROMPT, **fields: Any) -> Request:
        request = Request(tokens, **fields)
        self.tracker.add(request)
        return request

    def end_turn(self, tokens: list[int] = PROMPT, session: str = "s", **fields: Any) -> list[Save]:
        """A turn ends that left its blocks in vLLM's pool; the saves that are planned then."""
        fields = {"num_computed_tokens": len(tokens), "name": session} | fields
        request = self.add(tokens, session=session, **fields)
        self.tracker.finished(request, [self.pool.fill(request.block_hashes)])
        return self.planned()

    def planned(self) -> list[Save]:
        return self.tracker.take_step([], []).saves

    def acknowledge(self, save: Save, num_ranks: int = 2, skipped: bool = False) -> None:
        """So many ranks have ended the save; ``skipped``: one of them had no room for it."""
        jobs = {save.job} if skipped else set()
        self.tracker.absorb(set(), [], {save.job: num_ranks}, [], skipped=jobs)


def new_bench(
    groups: Groups = DENSE,
    pool: Pool | None = None,
    *,
    num_ranks: int = 2,
    max_staged_bytes: int = 1000,
) -> Bench:
    now, admitted, ended = [0.0], [], []
    ranks, pool, counters = Asked(), pool or Pool(), Counters()
    hot = ResidentSessions(monotonic=lambda: now[0])
    hot.bind(pool, groups)
    blocks = TokenBlocks(BLOCK, groups)
    orders: dict[str, Forward] = {}
    saves = TurnSaves(hot, blocks, num_ranks)
    tracker = RequestTracker(
        Restores(
            ranks,
            blocks,
            deadline_s=5.0,
            max_staged_bytes=max_staged_bytes,
            monotonic=lambda: now[0],
        ),
        PrefillsInFlight(blocks, STEP),
        saves,
        hot,
        MeasuredRequests(orders.get, hot, saves, blocks),
        on_admitted=lambda news: admitted.append((news.answer_id, news.cache)),
        on_turn_end=ended.append,
        counters=counters,
    )
    return Bench(tracker, ranks, hot, pool, now, admitted, ended, counters, orders)


def restored(bench: Bench, request: Request, end_block: int = 10) -> list[int]:
    """Up to the load being planned; the block ids."""
    bench.tracker.add(request)
    assert bench.tracker.match(request, 0) == (None, False)
    bench.ranks.answer(end_block)
    offered, later = bench.tracker.match(request, 0)
    assert (offered, later) == (end_block * BLOCK, True)
    ids = list(range(20, 31))
    bench.tracker.allocated(request, [ids], offered)
    return ids[:end_block]
