"""The route of messages: the counts beside its answer."""

from __future__ import annotations

from gateway.anthropic.routes import num_unknown
from tests.unit.gateway.anthropic.test_errors import BODY
from tests.unit.gateway.in_process import MODEL, App, RecordingEngine, chat_answer


def test_only_unknown_betas_are_counted() -> None:
    assert num_unknown("") == 0
    assert num_unknown("cache-diagnosis-2026-04-07, effort-2025-11-24") == 0
    assert num_unknown("made-up-2026-01-01,,context-management-2025-06-27 ") == 2


async def test_left_out_parts_show_in_the_metrics() -> None:
    app = App(RecordingEngine(chat_answer("x")))
    blocks = [{"type": "compaction", "content": "x"}, {"type": "text", "text": "hi"}]
    nonce = {"type": "text", "text": "x-anthropic-billing-header: cch=1;"}
    body = {**BODY, "system": [nonce], "messages": [{"role": "user", "content": blocks}]}
    assert (await app.post("/v1/messages", body, anthropic_beta="made-up-1")).status == 200
    text = (await app.get("/metrics")).body.decode()
    for kind in ("attribution", "block_compaction", "beta"):
        assert f'thermocline_left_out_total{{kind="{kind}"}} 1.0' in text
    (asked,) = app.engine.asked
    assert asked.body["messages"] == [{"role": "user", "content": "hi"}]
    assert asked.body["model"] == MODEL


async def test_a_changed_prompt_shows_in_the_metrics() -> None:
    app = App(RecordingEngine(chat_answer("x")))
    for text in ("one", "two"):
        body = {**BODY, "system": text}
        await app.post("/v1/messages", body, x_session_id="s")
    metrics = (await app.get("/metrics")).body.decode()
    assert 'thermocline_prompt_divergences_total{changed="system"} 1.0' in metrics
