"""The half beside vLLM's scheduler, with a scheduler and ranks that a test can read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from engines.vllm_plugin.hot import HotSessions
from engines.vllm_plugin.lookup import PATIENCE_S, Lookup, Turn
from engines.vllm_plugin.messages import Peek, Release, Stage, Staged
from kvstore.records import SessionRef
from kvstore.stats import Counters
from tests.block_sessions import BLOCK, hashes

PROMPT = list(range(42))  # ten blocks and two tokens


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
        """Put this chain into blocks from the tenth on; what is there already is shared."""
        for block_hash in chain:
            self.cached.setdefault(block_hash, self.blocks[10 + len(self.cached)])
        return [self.cached[x].block_id for x in chain]


@dataclass
class Asked:
    """The way to the ranks; a test answers for them."""

    ready: bool = True
    packed_bytes_per_token: int = 1
    sent: list[Stage | Peek | Release] = field(default_factory=list)
    answers: dict[int, Staged] = field(default_factory=dict)
    patience: list[float] = field(default_factory=list)

    def send(self, message: Stage | Peek | Release) -> None:
        self.sent.append(message)

    def staged(self, ticket: int, within_s: float = 0.0) -> Staged | None:
        self.patience.append(within_s)
        return self.answers.pop(ticket, None)

    def answer(self, end_block: int, tier="ram", reason=None, part=()) -> None:
        stage = next(x for x in reversed(self.sent) if isinstance(x, Stage))
        self.answers[stage.ticket] = Staged(stage.ticket, end_block, tier, reason, part)


class Request:
    """vLLM's request, as far as the plug-in reads it."""

    def __init__(self, tokens: list[int], name: str = "r1", session: str = "s", **fields: Any):
        self.request_id = name
        self.num_tokens = len(tokens)
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
        for key, value in fields.items():
            setattr(self, key, value)


@dataclass
class Bench:
    lookup: Lookup
    ranks: Asked
    hot: HotSessions
    pool: Pool
    now: list[float]
    admitted: list[tuple[str, str]]
    ended: list[SessionRef]
    counters: Counters


def new_bench(parts: bool = False) -> Bench:
    now, admitted, ended = [0.0], [], []
    ranks, pool, counters = Asked(), Pool(), Counters()
    hot = HotSessions(monotonic=lambda: now[0])
    hot.bind(pool)
    lookup = Lookup(
        ranks,
        hot,
        block_tokens=BLOCK,
        parts=parts,
        num_ranks=2,
        deadline_s=5.0,
        max_staged_bytes=1000,
        on_admitted=lambda mark, cache: admitted.append((mark, cache)),
        on_turn_end=ended.append,
        counters=counters,
        monotonic=lambda: now[0],
    )
    return Bench(lookup, ranks, hot, pool, now, admitted, ended, counters)


@pytest.fixture
def bench() -> Bench:
    return new_bench()


def restored(bench: Bench, request: Request, end_block: int = 10) -> list[int]:
    """Up to the load being planned; the block ids."""
    bench.lookup.add(request)
    assert bench.lookup.match(request, 0) == (None, False)
    bench.ranks.answer(end_block)
    offered, later = bench.lookup.match(request, 0)
    assert (offered, later) == (end_block * BLOCK, True)
    ids = list(range(20, 31))
    bench.lookup.allocated(request, [ids], offered)
    return ids[:end_block]


def test_nothing_is_offered_before_it_is_verified(bench):
    request = Request(PROMPT)
    bench.lookup.add(request)
    for _ in range(3):
        assert bench.lookup.match(request, 0) == (None, False)
    assert len(bench.ranks.sent) == 1
    stage = bench.ranks.sent[0]
    assert (stage.session.id, stage.first_block, len(stage.hashes)) == ("s", 0, 10 * 32)
    bench.ranks.answer(6)
    assert bench.lookup.match(request, 0) == (6 * BLOCK, True)
    assert bench.lookup.match(request, 0) == (6 * BLOCK, True)  # asking changes nothing


def test_while_nothing_runs_the_answer_may_be_waited_for(bench):
    """Once per step, however many ask; what is in memory is then offered without another step."""
    requests = [Request(PROMPT, name=f"r{i}") for i in range(3)]
    for request in requests:
        bench.lookup.add(request)
        assert bench.lookup.match(request, 0) == (None, False)
    assert bench.ranks.patience == [PATIENCE_S, 0, 0]
    assert bench.lookup.take_step([]).patience_s == PATIENCE_S
    bench.lookup.match(requests[0], 0)
    assert bench.ranks.patience[3:] == [PATIENCE_S]


def test_a_running_request_waits_for_nobody(bench):
    running, other = Request(PROMPT, name="r1"), Request(PROMPT, name="r2")
    bench.lookup.add(running)
    assert bench.lookup.take_step([("r1", 0)]).patience_s == 0
    bench.lookup.add(other)
    bench.lookup.match(other, 0)
    assert bench.ranks.patience == [0]
    bench.lookup.finished(running, [[]])
    assert bench.lookup.take_step([]).patience_s == PATIENCE_S


def test_one_token_is_always_left_to_compute(bench):
    request = Request(PROMPT[:40])  # ten whole blocks
    bench.lookup.add(request)
    bench.lookup.match(request, 0)
    assert len(bench.ranks.sent[0].hashes) == 9 * 32


def test_what_is_local_is_not_asked_for(bench):
    request = Request(PROMPT)
    bench.lookup.add(request)
    assert bench.lookup.match(request, 10 * BLOCK) == (0, False)
    assert bench.lookup.match(request, 4 * BLOCK) == (None, False)
    bench.ranks.answer(10)
    assert bench.lookup.match(request, 4 * BLOCK) == (6 * BLOCK, True)
    assert bench.lookup.match(request, 7 * BLOCK) == (3 * BLOCK, True)  # others computed more
    bench.lookup.allocated(request, [list(range(50, 61))], 3 * BLOCK)
    load = bench.lookup.take_step([]).loads[0]
    assert (load.first_block, load.block_ids) == (7, [57, 58, 59])


def test_a_local_prefix_that_shrank_is_asked_for_again(bench):
    request = Request(PROMPT)
    bench.lookup.add(request)
    bench.lookup.match(request, 4 * BLOCK)
    bench.ranks.answer(10)
    assert bench.lookup.match(request, 2 * BLOCK) == (None, False)
    assert [type(x) for x in bench.ranks.sent] == [Stage, Release, Stage]


def test_ranks_that_are_not_there_yet_are_not_waited_for(bench):
    bench.ranks.ready = False
    request = Request(PROMPT)
    bench.lookup.add(request)
    assert bench.lookup.match(request, 0) == (0, False)


def test_a_rank_that_never_answers_costs_the_deadline(bench):
    request = Request(PROMPT, name="x-tcm" + "0" * 24)
    bench.lookup.add(request)
    assert bench.lookup.match(request, 0) == (None, False)
    bench.now[0] = 7.1
    assert bench.lookup.match(request, 0) == (0, False)
    assert bench.lookup.match(request, 0) == (0, False)
    assert isinstance(bench.ranks.sent[-1], Release)
    bench.lookup.take_step([(request.request_id, 0)])
    assert bench.admitted == [("tcm" + "0" * 24, "miss; tokens=0; reason=deadline")]


def test_a_load_that_works(bench):
    request = Request(PROMPT, name="chatcmpl-tcm" + "a" * 24 + "-1")
    ids = restored(bench, request)
    assert bench.lookup.has_work
    step = bench.lookup.take_step([])
    assert [(x.request_id, x.first_block, x.block_ids) for x in step.loads] == [
        (request.request_id, 0, ids)
    ]
    bench.lookup.absorb(set(), [request.request_id], {})
    bench.lookup.take_step([(request.request_id, 40)])
    assert bench.admitted == [("tcm" + "a" * 24, "cold-ram; tokens=40")]
    assert bench.counters.as_dict() == {
        "restores": 1,
        "restored_tokens": 40,
        "restored_tokens.ram": 40,
        "prompts": 1,
        "prompt_tokens": 42,
        "cached_tokens": 40,
        "source.cold-ram": 1,
    }


def test_a_failed_load_is_not_offered_again(bench):
    """The livelock of the policy ``recompute``: block 0 fails, vLLM starts over and asks again."""
    request = Request(PROMPT)
    ids = restored(bench, request)
    bench.lookup.take_step([])
    bench.lookup.absorb({ids[0]}, [request.request_id], {})
    for _ in range(5):
        assert bench.lookup.match(request, 0) == (0, False)
    assert sum(isinstance(x, Stage) for x in bench.ranks.sent) == 1
    request.num_computed_tokens = 42
    told = bench.lookup.finished(request, [ids])
    assert told == {"restored_tokens": 0, "tier": "ram", "reason": "corrupt"}


def test_the_failure_may_be_told_a_step_earlier(bench):
    request = Request(PROMPT)
    ids = restored(bench, request)
    bench.lookup.absorb({ids[3]}, [], {})
    bench.lookup.absorb(set(), [request.request_id], {})
    assert bench.counters.as_dict() == {"loads_failed": 1}


def test_other_requests_failures_are_none_of_ours(bench):
    request = Request(PROMPT)
    restored(bench, request)
    bench.lookup.absorb({99}, [request.request_id], {})
    assert bench.counters.as_dict()["restores"] == 1
    assert "loads_failed" not in bench.counters.as_dict()


def test_a_miss_is_counted_as_its_client_was_told(bench):
    request = Request(PROMPT)
    bench.lookup.add(request)
    bench.lookup.match(request, 0)
    bench.ranks.answer(0, tier=None, reason="never-stored")
    assert bench.lookup.match(request, 0) == (0, False)
    assert (bench.lookup.num_running, bench.lookup.num_waiting) == (0, 1)
    bench.lookup.take_step([(request.request_id, 0)])
    bench.lookup.take_step([(request.request_id, 0)])  # told twice: after a preemption
    assert (bench.lookup.num_running, bench.lookup.num_waiting) == (1, 0)
    bench.lookup.finished(request, [[]])
    assert (bench.lookup.num_running, bench.lookup.num_waiting) == (0, 0)
    assert bench.counters.as_dict() == {
        "prompts": 1,
        "prompt_tokens": 42,
        "cached_tokens": 0,
        "source.miss": 1,
        "misses.never-stored": 1,
    }


def test_after_a_preemption_a_request_may_be_restored_again(bench):
    request = Request(PROMPT)
    restored(bench, request)
    bench.lookup.absorb(set(), [request.request_id], {})
    assert bench.lookup.match(request, 0) == (None, False)
    assert sum(isinstance(x, Stage) for x in bench.ranks.sent) == 2


@pytest.mark.parametrize("answered", [False, True])
def test_an_abort_before_the_load_releases_what_is_staged(bench, answered):
    request = Request(PROMPT)
    bench.lookup.add(request)
    bench.lookup.match(request, 0)
    if answered:
        bench.ranks.answer(10)
        bench.lookup.match(request, 0)
    bench.lookup.finished(request, [[]])
    assert isinstance(bench.ranks.sent[-1], Release)
    assert bench.lookup.is_settled
    assert not bench.hot.is_busy(("t", "s"))


def test_an_abort_during_the_load_saves_nothing(bench):
    request = Request(PROMPT, num_computed_tokens=40)
    ids = restored(bench, request)
    bench.lookup.take_step([])
    bench.lookup.finished(request, [ids])
    assert bench.lookup.take_step([]).saves == []
    bench.lookup.absorb(set(), [request.request_id], {})
    assert bench.lookup.is_settled


def test_a_turns_full_blocks_are_held_until_every_rank_has_them(bench):
    request = Request(PROMPT, num_computed_tokens=42)
    bench.lookup.add(request)
    ids = bench.pool.fill(request.block_hashes)
    bench.lookup.finished(request, [[*ids, 30]])
    save = bench.lookup.take_step([]).saves[0]
    assert (save.session.id, save.block_ids, len(save.hashes)) == ("s", ids, 10)
    assert {bench.pool.blocks[x].ref_cnt for x in ids} == {1}
    bench.lookup.absorb(set(), [], {save.job: 1})
    assert bench.lookup.has_work
    bench.lookup.absorb(set(), [], {save.job: 1})
    assert not bench.lookup.has_work
    assert bench.pool.freed == ids[::-1]  # the tail is reused first
    assert bench.ended == [save.session]


def test_tokens_of_a_step_in_flight_do_not_count(bench):
    request = Request(PROMPT, num_computed_tokens=40, num_in_flight_tokens=1)
    bench.lookup.add(request)
    bench.lookup.finished(request, [list(range(10))])
    assert len(bench.lookup.take_step([]).saves[0].hashes) == 9


def test_a_request_without_a_session_is_not_saved(bench):
    request = Request(PROMPT, num_computed_tokens=42, kv_transfer_params=None)
    bench.lookup.add(request)
    bench.lookup.finished(request, [list(range(10))])
    assert bench.lookup.is_settled


def test_vllms_own_session_id_will_do(bench):
    request = Request(PROMPT, num_computed_tokens=42, kv_transfer_params=None, session_id="theirs")
    bench.lookup.add(request)
    bench.lookup.finished(request, [list(range(10))])
    assert bench.lookup.take_step([]).saves[0].session == SessionRef("", "theirs", b"ab")


def test_adapters_are_neither_restored_nor_saved(bench):
    request = Request(PROMPT, num_computed_tokens=42, lora_request=object())
    bench.lookup.add(request)
    assert bench.lookup.match(request, 0) == (0, False)
    bench.lookup.finished(request, [list(range(10))])
    assert bench.lookup.is_settled


def test_prompt_logprobs_need_every_token_computed(bench):
    request = Request(PROMPT, skip_reading_prefix_cache=True)
    bench.lookup.add(request)
    assert bench.lookup.match(request, 0) == (0, False)


def ran(bench: Bench, name: str, tokens: list[int]) -> list[int]:
    """One whole turn that left its blocks in vLLM's pool."""
    request = Request(tokens, name=name, session=name, num_computed_tokens=len(tokens))
    bench.lookup.add(request)
    ids = bench.pool.fill(request.block_hashes)
    bench.lookup.finished(request, [ids])
    for save in bench.lookup.take_step([]).saves:
        bench.lookup.absorb(set(), [], {save.job: 2})
    return ids


def test_demoted_blocks_are_gone_before_the_next_look(bench):
    ran(bench, "a", PROMPT)
    assert bench.hot.num_resident(("t", "a")) == 10
    bench.hot.ask_to_drop(("t", "a"))
    assert bench.hot.num_resident(("t", "a")) == 0
    assert bench.pool.cached  # vLLM's tables change on vLLM's thread only
    bench.lookup.add(Request([7] * 42, name="other", session="other"))
    assert not bench.pool.cached


def test_blocks_that_another_session_needs_stay(bench):
    ran(bench, "a", PROMPT)
    ran(bench, "b", [*PROMPT[:20], *range(500, 522)])
    bench.hot.ask_to_drop(("t", "a"))
    bench.lookup.take_step([])
    assert bench.hot.num_resident(("t", "b")) == 10
    assert len(bench.pool.cached) == 10


def test_a_turn_that_came_meanwhile_keeps_its_blocks(bench):
    ran(bench, "a", PROMPT)
    bench.hot.ask_to_drop(("t", "a"))
    with_turn = Request(PROMPT, name="again", session="a")
    bench.hot.begin(SessionRef("t", "a", b""))
    bench.lookup.add(with_turn)
    assert len(bench.pool.cached) == 10


def test_idle_time_and_business_of_sessions(bench):
    bench.now[0] = 100.0
    request = Request(PROMPT, num_computed_tokens=42)
    bench.lookup.add(request)
    assert bench.hot.is_busy(("t", "s"))
    bench.now[0] = 107.0
    bench.lookup.finished(request, [list(range(10))])
    bench.now[0] = 110.0
    assert not bench.hot.is_busy(("t", "s"))
    assert bench.hot.idle_s(("t", "s")) == 3.0
    assert bench.hot.idle_s(("t", "nobody")) is None


def test_what_requests_and_saves_hold_is_not_idle(bench):
    """It is counted as used, and twice would be pressure that is none."""
    request = Request(PROMPT, num_computed_tokens=len(PROMPT))
    bench.lookup.add(request)
    ids = bench.pool.fill(request.block_hashes)
    bench.lookup.finished(request, [ids])
    assert (bench.hot.num_used_blocks(), bench.hot.num_idle_blocks()) == (10, 0)
    for save in bench.lookup.take_step([]).saves:
        bench.lookup.absorb(set(), [], {save.job: 2})
    assert (bench.hot.num_used_blocks(), bench.hot.num_idle_blocks()) == (0, 10)
    bench.lookup.add(Request(PROMPT, name="again"))
    assert bench.hot.num_idle_blocks() == 0


@pytest.mark.parametrize(
    ("reason", "tokens", "expected"),
    [
        ("never-stored", 0, "miss; tokens=0; reason=never-stored"),
        ("never-stored", 64, "hot; tokens=64"),
        ("corrupt", 64, "hot; tokens=64; reason=corrupt"),
        (None, 64, "hot; tokens=64"),
    ],
)
def test_the_cache_header(reason, tokens, expected):
    assert Turn(None, None, reason=reason).cache_header(tokens) == expected
