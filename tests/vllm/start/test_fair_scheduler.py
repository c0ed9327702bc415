"""The real scheduler of vLLM with fair shares, and a made-up model: a token for each position."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own")

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from engines.http import with_session
from engines.vllm_plugin.identity import marked_id
from engines.vllm_plugin.process.command import SCHEDULER
from kvstore.session import SessionRef
from tests.vllm.rig.tiny_model import write_tiny_model

pytestmark = pytest.mark.vllm
BLOCK, PLACES = 32, 4


class Driven:
    """A scheduler, and steps of a model that answers at once, or one step later."""

    def __init__(self, folder: Path, *, one_ahead: bool, num_blocks: int = 200) -> None:
        args = EngineArgs(
            model=str(write_tiny_model(folder)),
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=2048,
            max_num_seqs=PLACES,
            block_size=BLOCK,
            scheduler_cls=SCHEDULER,
            async_scheduling=one_ahead,
            enable_prefix_caching=True,
            prefix_caching_hash_algo="sha256_cbor",
        )
        config = args.create_engine_config()
        config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float32
        )
        init_none_hash(sha256_cbor)
        self._hasher = get_request_block_hasher(BLOCK, sha256_cbor)
        self.scheduler: Any = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        self._depth = 2 if one_ahead else 1
        self._in_flight: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self._prompts: dict[str, int] = {}
        self._known: dict[str, int] = {}  # tokens of prompt and answer, those in flight included
        self.answers: dict[str, list[int]] = {}
        self.preempted: list[str] = []
        self.first_step: dict[str, int] = {}
        self.num_steps = 0

    def add(self, tenant: str, number: int, num_prompt: int, num_answer: int) -> str:
        answer_id = f"tcm{tenant.encode().hex():0>20}{number:04x}"
        request_id, session = marked_id(answer_id, 1), SessionRef(tenant, f"s{number}", b"salt")
        fields = with_session({}, session)
        params = SamplingParams(
            max_tokens=num_answer,
            ignore_eos=True,
            extra_args={"kv_transfer_params": fields["kv_transfer_params"]},
        )
        prompt = [1 + hash((tenant, number, i)) % 900 for i in range(num_prompt)]
        request = Request(request_id, prompt, params, None, block_hasher=self._hasher)
        self._prompts[request_id] = self._known[request_id] = num_prompt
        self.answers[request_id] = []
        self.scheduler.add_request(request)
        return request_id

    def step(self) -> None:
        self.num_steps += 1
        output = self.scheduler.schedule()
        self.preempted += sorted(output.preempted_req_ids or ())
        self._in_flight.append((output, self._computed(output)))
        if len(self._in_flight) >= self._depth:
            self._deliver()

    def run(self, limit: int = 3000) -> None:
        while self.scheduler.has_unfinished_requests() or self._in_flight:
            assert self.num_steps < limit, "it goes on for ever"
            if self.scheduler.has_unfinished_requests():
                self.step()
            else:
                self._deliver()

    def _computed(self, output: Any) -> ModelRunnerOutput:
        """Sample a token for each request whose last known token is computed in this step."""
        before = {x.req_id: x.num_computed_tokens for x in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        ids, sampled = list(output.num_scheduled_tokens), []
        for request_id in ids:
            self.first_step.setdefault(request_id, self.num_steps)
            after = before[request_id] + output.num_scheduled_tokens[request_id]
            assert after <= self._known[request_id]
            whole = after == self._known[request_id]
            sampled.append([token_at(request_id, after)] if whole else [])
            self._known[request_id] += whole
        return ModelRunnerOutput(ids, {x: i for i, x in enumerate(ids)}, sampled)

    def _deliver(self) -> None:
        output, computed = self._in_flight.popleft()
        for group in self.scheduler.update_from_output(output, computed).values():
            for one in group.outputs:
                self.answers[one.request_id] += one.new_token_ids

    def expected(self, request_id: str, num_answer: int) -> list[int]:
        first = self._prompts[request_id]
        return [token_at(request_id, first + i) for i in range(num_answer)]


def token_at(request_id: str, position: int) -> int:
    return 1 + (sum(request_id.encode()) * 31 + position * 7) % 900


@pytest.fixture(params=[False, True], ids=["in step", "one ahead"])
def driven(request: pytest.FixtureRequest, tmp_path: Path) -> Driven:
    return Driven(tmp_path, one_ahead=request.param)


def test_endless_requests_make_way_and_lose_no_position(driven):
    greedy = [driven.add("greedy", i, 40, 400) for i in range(PLACES)]
    for _ in range(20):
        driven.step()
    modest = []
    for number in range(5):
        came = driven.num_steps
        modest.append(driven.add("modest", number, 40, 8))
        for _ in range(30):
            driven.step()
        assert driven.first_step[modest[-1]] - came <= 4
    driven.run()
    assert driven.preempted
    for request_id, length in [*((x, 400) for x in greedy), *((x, 8) for x in modest)]:
        assert driven.answers[request_id] == driven.expected(request_id, length)


def test_two_endless_tenants_get_equal_tokens(driven):
    greedy = [driven.add("a", i, 40, 700) for i in range(PLACES)]
    for _ in range(10):
        driven.step()
    others = [driven.add("b", i, 40, 700) for i in range(PLACES)]
    for _ in range(700):
        driven.step()
    served = [sum(len(driven.answers[x]) for x in mine) for mine in (greedy, others)]
    assert 0.85 < served[0] / served[1] < 1.18
    driven.run()
    for request_id in (*greedy, *others):
        assert driven.answers[request_id] == driven.expected(request_id, 700)


def test_one_tenant_alone_is_served_as_ever(driven):
    mine = [driven.add("a", i, 40, 50) for i in range(3 * PLACES)]
    driven.run()
    assert not driven.preempted
    assert sorted(driven.first_step, key=driven.first_step.__getitem__) == mine


def test_who_holds_all_blocks_makes_way(tmp_path):
    driven = Driven(tmp_path, one_ahead=True, num_blocks=2 * (600 // BLOCK) + 6)
    greedy = [driven.add("greedy", i, 560, 100) for i in range(2)]
    for _ in range(10):
        driven.step()
    modest = driven.add("modest", 0, 300, 4)
    driven.run()
    assert driven.answers[modest] == driven.expected(modest, 4)
    for request_id in greedy:
        assert driven.answers[request_id] == driven.expected(request_id, 100)


def test_a_short_prompt_does_not_wait_for_ten_long_ones_of_its_tenant(driven):
    long = [driven.add("a", i, 700, 30) for i in range(10)]
    driven.step()
    short = driven.add("a", 99, 40, 4)
    driven.run()
    begun = sorted(driven.first_step, key=driven.first_step.__getitem__)
    assert begun.index(short) <= PLACES + 1  # after those that ran, and the oldest
    for request_id, length in [*((x, 30) for x in long), (short, 4)]:
        assert driven.answers[request_id] == driven.expected(request_id, length)


def test_a_prompt_takes_the_place_of_its_own_tenants_endless_answer(driven):
    endless = [driven.add("a", i, 40, 900) for i in range(PLACES)]
    for _ in range(20):
        driven.step()
    short = []
    for number in range(4):
        came = sum(map(len, driven.answers.values()))
        short.append(driven.add("a", 50 + number, 40, 8))
        while short[-1] not in driven.first_step:
            driven.step()
        assert sum(map(len, driven.answers.values())) - came <= PLACES * (256 + 2 * 64)
        for _ in range(20):
            driven.step()
    assert not any(len(driven.answers[x]) == 900 for x in endless)
    driven.run()
    assert driven.preempted
    for request_id, length in [*((x, 900) for x in endless), *((x, 8) for x in short)]:
        assert driven.answers[request_id] == driven.expected(request_id, length)
