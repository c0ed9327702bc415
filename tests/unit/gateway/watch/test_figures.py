"""Sums of sessions by where their KV is, and the gate's verdicts over time."""

from __future__ import annotations

import msgspec

from engines.wire import CodecReport
from gateway.watch.figures import Sums
from gateway.watch.live import MAX_VERDICTS, Verdicts
from scheduler.session import State
from tests.unit.engines.calibration.gate.test_bound import GOOD
from tests.unit.scheduler.test_session import new_session

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
