"""Models with layers that do not keep all tokens, on real engines: recurrent, and with windows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.config import StoreConfig
from tests.vllm.conftest import FAULTY_RAW
from tests.vllm.rig.engine import BLOCK, RealEngine, Result, opened
from tests.vllm.rig.faulty_codec import Faults
from tests.vllm.rig.tiny_families import write_recurrent, write_windowed

pytestmark = pytest.mark.vllm

POOL_BLOCKS = 60  # of all groups together: room for two of the sessions
ANSWER = 12  # reaches beyond the next boundary
WHOLE = 599 // BLOCK * BLOCK
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "windowed": (write_windowed, {}),
    "recurrent": (write_recurrent, {"mamba_block_size": BLOCK}),
}


@pytest.fixture(
    scope="module", params=[pytest.param("windowed", marks=pytest.mark.thorough), "recurrent"]
)
def shared(
    request: pytest.FixtureRequest, faults: Faults, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealEngine]:
    write, options = MODELS[request.param]
    store = StoreConfig(codec=FAULTY_RAW, ram_bytes=1 << 30, disk_bytes=1 << 30)
    sizes = {"num_gpu_blocks_override": POOL_BLOCKS, "max_model_len": 768, "max_num_seqs": 8}
    folder = tmp_path_factory.mktemp(request.param)
    with opened(folder, write, store, **sizes, **options) as engine:
        yield engine


@pytest.fixture
def hybrid(shared: RealEngine, faults: Faults) -> Iterator[RealEngine]:
    assert shared.forget_local()
    yield shared
    faults.clear()
    assert shared.forget_local(), "blocks are held after the test"


def ask(engine: RealEngine, prompt: list[int], session: str = "", **options: Any) -> Result:
    return engine.ask(prompt, session, tokens=ANSWER, **options)


def same(a: Result, b: Result) -> bool:
    return (a.tokens, a.logprobs) == (b.tokens, b.logprobs)


def begin_alike(a: Result, b: Result) -> bool:
    """Whether two answers have one first token; the next may be a tie that other rows decide.

    A row's last digits depend on the rows beside it: on the recurrent model vLLM's own prefix hits
    give logprobs that differ by up to 0.05 between a prompt alone and the same one beside others.
    """
    return a.tokens[0] == b.tokens[0] and abs(a.logprobs[0] - b.logprobs[0]) < 0.1


def test_restored_is_own_hit_is_fresh(hybrid, sessions):
    fresh = ask(hybrid, sessions[0], "whole")
    own = ask(hybrid, sessions[0])
    assert (own.cached, own.restored) == (WHOLE, 0)
    hybrid.wait_saved("whole")
    hybrid.forget_local()
    back = ask(hybrid, sessions[0], "whole")
    assert (back.cached, back.restored, back.tier) == (WHOLE, WHOLE, "ram")
    assert same(back, own)
    assert back.tokens == fresh.tokens
    assert max(abs(a - b) for a, b in zip(back.logprobs, fresh.logprobs, strict=True)) < 1e-3


def test_the_next_turn(hybrid, sessions):
    """An answer that ends before the next boundary: vLLM cuts both prompts alike."""
    before = sessions[1][:590]
    first = ask(hybrid, before, "turns")
    hybrid.wait_saved("turns")
    prompt = [*before, *first.tokens, *range(100, 160)]
    own = ask(hybrid, prompt)
    hybrid.forget_local()
    back = ask(hybrid, prompt, "turns")
    assert own.cached == back.restored == WHOLE
    assert same(back, own)


def test_a_changed_answer_comes_back_up_to_the_prompt(hybrid, sessions):
    """Some chat templates leave out a model's reasoning."""
    ask(hybrid, sessions[2], "edited")
    hybrid.wait_saved("edited")
    prompt = [*sessions[2], *range(100, 160)]
    own = ask(hybrid, prompt)
    hybrid.forget_local()
    back = ask(hybrid, prompt, "edited")
    assert back.restored == own.cached == WHOLE
    assert same(back, own)


def test_nothing_where_no_state_is_stored(hybrid, sessions):
    ask(hybrid, sessions[3], "short")
    hybrid.wait_saved("short")
    hybrid.forget_local()
    prompt = [*sessions[3][:300], *range(100, 160)]
    back = ask(hybrid, prompt)
    assert (back.cached, back.restored) == (0, 0)
    hybrid.forget_local()
    assert same(ask(hybrid, prompt), back)


def test_after_a_real_eviction(hybrid, sessions):
    prompts = [x[::-1] for x in sessions[:4]]
    alone = [ask(hybrid, x, f"cycle{i}") for i, x in enumerate(prompts)]
    for i in range(len(prompts)):
        hybrid.wait_saved(f"cycle{i}")
    back = [ask(hybrid, x, f"cycle{i}") for i, x in enumerate(prompts)]
    assert [x.tokens for x in back] == [x.tokens for x in alone]
    assert [x.cached for x in back] == [WHOLE] * len(prompts)
    assert sum(x.restored > 0 for x in back) >= 2


def test_a_session_reported_hot_needs_no_restore(hybrid, sessions):
    prompts = [x[50:] + x[:50] for x in sessions[:4]]
    for i, x in enumerate(prompts):
        ask(hybrid, x, f"reported{i}")
        hybrid.wait_saved(f"reported{i}")
    reported, restored = [], []
    for i in reversed(range(len(prompts))):
        reported.append(hybrid.sessions()[f"reported{i}"].hot)
        restored.append(ask(hybrid, prompts[i], f"reported{i}").restored)
    assert reported == [not x for x in restored]
    assert {True, False} == set(reported)


def test_a_failed_load_is_computed_again(hybrid, sessions, faults):
    prompt = sessions[4]
    right = ask(hybrid, prompt, "failing")
    hybrid.wait_saved("failing")
    hybrid.forget_local()
    faults.fail(256)
    back = ask(hybrid, prompt, "failing")
    assert (back.cached, back.restored, back.reason) == (0, 0, "corrupt")
    assert same(back, right)
    faults.clear()
    hybrid.forget_local()  # once it can, the new save is in the workers' hands
    hybrid.wait_saved("failing")
    again = ask(hybrid, prompt, "failing")
    assert again.restored == WHOLE
    assert again.tokens == right.tokens


def test_two_at_a_time_and_one_that_leaves(hybrid, sessions, faults):
    prompts = [x[100:] + x[:100] for x in sessions[:2]]
    alone = [ask(hybrid, x, f"both{i}") for i, x in enumerate(prompts)]
    for i in range(2):
        hybrid.wait_saved(f"both{i}")
    hybrid.forget_local()
    back = hybrid.ask_all([(x, f"both{i}") for i, x in enumerate(prompts)], tokens=ANSWER)
    assert [x.restored for x in back] == [WHOLE] * 2
    assert all(begin_alike(*x) for x in zip(back, alone, strict=True))
    changed = ask(hybrid, [*prompts[0][:-8], *prompts[1][-8:]])
    assert not begin_alike(changed, alone[0]), "this model's answers hardly depend on its prompt"
    hybrid.forget_local()
    faults.delay(0.2)
    assert ask(hybrid, prompts[0], "both0", abort_when=faults.is_decoding).tokens == []
    faults.clear()
    assert hybrid.forget_local()
    assert ask(hybrid, prompts[0], "both0").tokens == alone[0].tokens
