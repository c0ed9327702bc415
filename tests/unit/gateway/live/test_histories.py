"""Sessions' pasts are bounded, and go when their session is forgotten."""

from __future__ import annotations

from engines.headers import CacheOutcome
from engines.wire import SessionRef
from gateway.live.history import MAX_STEPS, MAX_TURNS, Histories
from gateway.live.requests import LiveRequest
from gateway.live.shape import TurnShown
from gateway.live.tally import PrefillSpeed, Tally
from gateway.metrics import PromptDetails, Usage
from scheduler.observer import Step

REF = SessionRef("alice", "s", b"")
KEY = ("alice", "s")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def request(clock: Clock, source: str, cached: int, prompt: int, first_s: float) -> LiveRequest:
    """A streamed turn that is over, which waited for 1 s before the engine had it."""
    made = LiveRequest(REF, "req_1", "chat", "curl", 5.0, clock)
    clock.now += 1.0
    made.admitted()
    made.cache = CacheOutcome(source, cached)  # type: ignore[arg-type]
    clock.now += first_s
    assert not made.took(b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n')
    assert made.took(b'data: {"choices":[{"delta":{"content":"word"}}]}\n\n')
    clock.now += 0.5
    made.usage = Usage(prompt, 7, PromptDetails(cached))
    return made


def turn(clock: Clock) -> TurnShown:
    return request(clock, "hot", 10, 12, 0.1).turn(saved_s=2.0)


def test_a_turn_says_where_its_prompt_came_from_and_how_long_it_took():
    shown = request(Clock(), "cold-disk", 400, 500, 0.25).turn(saved_s=None)
    assert (shown.reused_tokens, shown.restored_tokens, shown.computed_tokens) == (400, 400, 100)
    assert (shown.waited_s, shown.first_token_s, shown.total_s) == (1.0, 1.25, 1.75)


def test_what_is_spared_is_a_prefill_at_the_measured_speed_less_the_time_to_restore():
    clock, speed = Clock(), PrefillSpeed()
    back = request(clock, "cold-ram", 900, 1000, 0.5)
    assert speed.saved_s(back) is None, "no speed is known yet"
    speed.learn(request(clock, "miss", 0, 1000, 2.0))
    assert speed.tokens_per_s == 500.0
    # 900 tokens are 1.8 s; 0.5 s until the first token, 0.2 s of it for the 100 computed ones.
    assert speed.saved_s(back) == 1.8 - 0.3


def test_an_engines_comments_tell_how_far_a_prefill_is_and_its_speed():
    clock, speed = Clock(), PrefillSpeed()
    made = LiveRequest(REF, "req_1", "chat", "curl", 5.0, clock)
    made.admitted()
    made.cache = CacheOutcome("miss", 0)
    clock.now += 2.0
    assert not made.took(b": prefill 500/2000\n\n")
    for odd in (b": prefill x/y\n\n", b": prefill 9\n\n", b": prefill " + b"9" * 99 + b"/1\n\n"):
        assert not made.took(odd)
    assert (made.prompt_tokens, made.prefilled_tokens) == (2000, 500)
    assert made.phase_now == "prefill"
    speed.learn(made)  # the client gave up, and yet something was learned
    assert speed.tokens_per_s == 250.0


def test_pasts_are_bounded_each_and_together():
    clock = Clock()
    pasts = Histories(clock, max_records=200)
    for _ in range(100):
        pasts.turned(KEY, turn(clock))
        pasts.stepped(KEY, Step("idle", "turn", "active"))
    past = pasts.of(KEY)
    assert past is not None
    assert (len(past.turns), len(past.steps)) == (MAX_TURNS, MAX_STEPS)
    assert past.num_turns == 100 and past.saved_s == 200.0
    for i in range(100):
        pasts.turned(("bob", str(i)), turn(clock))
    assert pasts.of(KEY) is None, "the longest quiet goes first"
    assert sum(pasts.of(("bob", str(i))) is not None for i in range(100)) == 100


def test_a_forgotten_session_leaves_no_past():
    pasts = Histories(Clock())
    pasts.turned(KEY, turn(Clock()))
    pasts.forget(KEY)
    pasts.forget(KEY)
    assert pasts.of(KEY) is None


def test_sums_of_today_begin_again_at_midnight_and_rates_look_back_ten_seconds():
    clock = Clock()
    tally = Tally(clock)
    tally.add(request(Clock(), "hot", 30, 40, 0.1), 3.0)
    assert tally.today == (30, 3.0, 1)
    assert tally.outcomes == {"hot": {"": 1}}
    assert tally.rates(0.0, 0, 0) == (0.0, 0.0)
    assert tally.rates(10.0, 50, 100) == (5.0, 10.0)
    assert tally.rates(20.0, 50, 100) == (0.0, 0.0)
    clock.now += 86_400
    assert tally.today == (0, 0.0, 0)
