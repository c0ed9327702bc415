"""Turns, their speeds, sessions' pasts and the gate's verdicts, as a reader is shown them."""

from __future__ import annotations

import msgspec
import pytest

from engines.http import CacheOutcome
from engines.wire import CodecReport, SessionRef
from gateway.watch.figures import Sums
from gateway.watch.live import MAX_STEPS, MAX_TURNS, MAX_VERDICTS, Histories, Verdicts, title_of
from gateway.watch.requests import LiveRequest, PromptDetails, Stretch, Usage
from gateway.watch.shape import TurnRecord
from gateway.watch.tally import Pace, PrefillSpeed, Tally
from scheduler.session import State, Step
from tests.clock import Clock
from tests.qualities import GOOD
from tests.unit.gateway.watch.streamed import answered, said
from tests.unit.scheduler.test_session import new_session

REF = SessionRef("alice", "s", b"")
KEY = ("alice", "s")


def live_request(id: str, clock: Clock) -> LiveRequest:
    return LiveRequest(REF, id, "chat", "curl", 5.0, clock)


def request(clock: Clock, source: str, cached: int, prompt: int, first_s: float) -> LiveRequest:
    """A streamed turn that is over, which waited for 1 s before the engine had it."""
    made = live_request("req_1", clock)
    clock.now += 1.0
    made.admitted()
    answered(made, CacheOutcome(source, cached), prompt)  # type: ignore[arg-type]
    clock.now += first_s
    said(made, b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n')
    assert made.first_token_s is None
    said(made)
    assert made.first_token_s is not None
    clock.now += 0.5
    made.answered(Usage(prompt, 7, PromptDetails(cached)))
    return made


def turn(clock: Clock) -> TurnRecord:
    return request(clock, "hot", 10, 12, 0.1).turn(saved_s=2.0)


def test_a_turn_says_where_its_prompt_came_from_and_how_long_it_took():
    shown = request(Clock(), "cold-disk", 400, 500, 0.25).turn(saved_s=None)
    assert (shown.reused_tokens, shown.restored_tokens, shown.computed_tokens) == (400, 400, 100)
    assert (shown.waited_s, shown.first_token_s, shown.total_s) == (1.0, 1.25, 1.75)


def test_the_saved_time_is_a_prefill_at_the_measured_speed_less_the_time_to_restore():
    clock, speed = Clock(), PrefillSpeed()
    back = request(clock, "cold-ram", 900, 1000, 0.5)
    assert speed.saved_s(back) is None, "no speed is known yet"
    speed.learn(request(clock, "miss", 0, 1000, 2.0))
    assert speed.tokens_per_s == 500.0
    # 900 tokens are 1.8 s; 0.5 s until the first token, 0.2 s of it for the 100 computed ones.
    assert speed.saved_s(back) == 1.8 - 0.3


def test_an_engines_comments_say_how_far_a_prefill_is_and_its_speed():
    clock, speed = Clock(), PrefillSpeed()
    made = live_request("req_1", clock)
    made.admitted()
    made.cache = CacheOutcome("miss", 0)
    clock.now += 2.0
    said(made, b": prefill 500/2000\n\n")
    for odd in (b": prefill x/y\n\n", b": prefill 9\n\n", b": prefill " + b"9" * 99 + b"/1\n\n"):
        said(made, odd)
    assert made.first_token_s is None
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
    assert (len(past.turns), len(past.steps)) == (MAX_TURNS, MAX_STEPS)
    assert past.num_turns == 100 and past.saved_s == 200.0
    for i in range(100):
        pasts.turned(("bob", str(i)), turn(clock))
    assert pasts.of(KEY) is None, "the longest quiet goes first"
    assert sum(pasts.of(("bob", str(i))) is not None for i in range(100)) == 100


def test_sums_of_today_begin_again_at_midnight():
    clock = Clock()
    tally = Tally(clock)
    tally.add(request(Clock(), "hot", 30, 40, 0.1).turn(saved_s=3.0))
    assert tally.today == (30, 3.0, 1)
    assert tally.outcomes == {"hot": {"": 1}}
    clock.now += 86_400
    assert tally.today == (0, None, 0)


def paced(made: LiveRequest, tally: Tally) -> None:
    for stretch in made.uncounted():
        tally.count(stretch)


def rates(tally: Tally, clock: Clock) -> tuple[float, float]:
    return tally.paces["computed"].rate(clock.now), tally.paces["answered"].rate(clock.now)


def test_the_first_rate_of_an_answer_is_its_own_speed_after_any_time_without_readers():
    clock, pace = Clock(), Tally(Clock())
    paced(request(clock, "miss", 0, 100, 0.5), pace)  # an earlier turn, seen by a reader
    clock.now += 160.0
    assert rates(pace, clock) == (0.0, 0.0)
    made = live_request("req_2", clock)
    made.admitted()
    answered(made, CacheOutcome("miss", 0), 90)
    clock.now += 9.0
    said(made)
    paced(made, pace)
    assert rates(pace, clock)[0] == 10.0, "90 tokens in 9 s"
    for _ in range(63):
        clock.now += 17 / 64
        said(made)
        paced(made, pace)
        assert 2.0 <= rates(pace, clock)[1] <= 5.0
    assert rates(pace, clock)[1] == 3.8, "64 tokens in 17 s"


def test_an_answer_that_comes_whole_counts_over_the_time_that_it_took():
    clock, pace = Clock(), Tally(Clock())
    made = live_request("req_1", clock)
    made.admitted()
    clock.now += 20.0
    assert made.uncounted() == [], "nothing is known yet"
    made.answered(Usage(100, 60, PromptDetails(0)))
    paced(made, pace)
    assert rates(pace, clock) == (5.0, 3.0)
    paced(made, pace)
    assert rates(pace, clock) == (5.0, 3.0), "nothing counts twice"
    clock.now += 5.0
    assert rates(pace, clock) == (2.5, 1.5)
    clock.now += 6.0
    assert rates(pace, clock) == (0.0, 0.0)


def test_a_request_that_waits_is_not_counted():
    waiting = live_request("req_1", Clock())
    waiting.usage = Usage(10)
    assert (waiting.uncounted(), waiting.tokens_so_far, waiting.in_engine) == ([], 0, False)


def test_the_last_hour_is_given_in_steps_without_any_readers():
    tally, start = Tally(Clock()), 995.0
    tally.count(Stretch("computed", 1000.0, 1020.0, 200))
    tally.count(Stretch("answered", 1015.0, 1025.0, 20))
    assert tally.hour(1031.0, start) == (990.0, [0.0, 10.0, 10.0, 0.0], [0.0, 0.0, 1.0, 1.0])
    since, prompts, answers = tally.hour(1000.0 + 4000.0, start)
    assert since == 1400.0 and len(prompts) == 360 and not any(prompts + answers)
    assert tally.hour(start, start)[1:] == ([], [])


def test_a_pace_is_bounded_and_a_long_answer_spreads_over_an_hour():
    pace = Pace()
    for i in range(20_000):
        pace.add(i * 1.0, i + 1.0, 3)
    assert pace.rate(20_000.0) == 3.0
    assert sum(len(x._tokens) for x in (pace._recent, pace._hour)) <= 2 * (11 + 360) + 2
    pace.add(0.0, 30_000.0, 30_000)
    assert pace.rate(30_000.0) == 1.0
    assert pace.hour(2640, 3000) == [1.0] * 360


@pytest.mark.parametrize(
    ("steps", "moves"),
    [
        ([("active", "quiet", "idle", None)], [("", "hot")]),
        ([("idle", "turn", "active", "ram"), ("active", "quiet", "idle", "ram")], []),
        (
            [("cold", "wake", "waking", "disk"), ("waking", "woken", "idle", "ram")],
            [("disk", "hot")],
        ),
        (
            [
                ("idle", "hibernate", "hibernating", "ram"),
                ("hibernating", "evicted", "cold", "disk"),
            ],
            [("hot", "disk")],
        ),
        ([("cold", "moved", "cold", "redis")], []),  # adopted there; it was seen nowhere else
        (
            [("idle", "evicted", "cold", "ram"), ("cold", "moved", "cold", "redis")],
            [("hot", "ram"), ("ram", "redis")],
        ),
    ],
)
def test_steps_say_from_where_to_where_a_session_went(steps, moves):
    pasts = Histories(Clock())
    places = [pasts.stepped(KEY, Step(*step)) for step in steps]
    assert [x for x in places if x[0] != x[1]] == moves


@pytest.mark.parametrize(
    ("messages", "title"),
    [
        ([], ""),
        ([{"role": "system", "content": "be nice"}, {"role": "user", "content": " a\n b "}], "a b"),
        ([{"role": "user", "content": "w" * 61}], "w" * 59 + "…"),
        ([{"role": "user", "content": "\u202eevil\x1b[2J"}], "evil[2J"),
        (
            [
                {"role": "user", "content": [{"type": "text", "text": "<env>x</env>"}]},
                {"role": "user", "content": [{"type": "image_url"}, {"text": "fix the tests"}]},
            ],
            "fix the tests",
        ),
        ([{"role": "user", "content": None}, "x", {"role": "user", "content": ["x", 3]}], ""),
    ],
)
def test_a_title_is_the_first_that_a_user_said(messages, title):
    assert title_of(messages) == title


# ---- sums, and the verdicts of the gate

RAW = CodecReport(name="raw", id="raw.1", why="not measured", unmeasured=True)
DENSE = CodecReport(name="dense3", id="dense3.1", why="within the bound", rows=(GOOD,))


def test_only_a_cold_session_sleeps_and_a_hot_one_has_a_copy():
    sums = Sums()
    for state in (State.ACTIVE, State.IDLE, State.COLD, State.WAKING):
        session = new_session(state)
        session.tier = "ram"
        sums.add(session, hot_bytes=1, bf16_bytes=1)
    assert (sums.asleep["ram"], sums.copied["ram"]) == (1, 3)


def test_each_verdict_is_remembered_once_with_its_time():
    now = [100.0]
    verdicts = Verdicts(lambda: now[0])
    assert verdicts.note(None) == []
    for _ in range(3):
        verdicts.note(RAW)
        now[0] += 60
    measuring = msgspec.structs.replace(RAW, progress="measuring: 3 of 12 cases")
    assert len(verdicts.note(measuring)) == 1, "that is no verdict"
    before, after = verdicts.note(DENSE)
    assert (before.at, before.measured, before.worst_kl) == (100.0, False, None)
    assert (after.at, after.measured, after.worst_kl) == (280.0, True, GOOD.kl)
    assert after.codec == "dense3.1"


def test_the_oldest_verdicts_go():
    verdicts = Verdicts(lambda: 1.0)
    for i in range(MAX_VERDICTS + 5):
        verdicts.note(msgspec.structs.replace(RAW, why=str(i)))
    assert [x.why for x in verdicts.note(None)] == [str(i) for i in range(5, MAX_VERDICTS + 5)]
