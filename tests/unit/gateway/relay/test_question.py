"""The count of a prompt's tokens, in each dialect."""

from __future__ import annotations

import msgspec

from engines.wire import TemplateRules
from tests.unit.gateway.in_process import MODEL, WELCOME, Answered, App, RecordingEngine


async def test_a_count_is_of_the_prompt_as_it_would_be_served() -> None:
    rules = TemplateRules(inline_system=False, reasoning_switch={"preserve_thinking": True})
    welcome = msgspec.structs.replace(WELCOME, template=rules)
    engine = RecordingEngine(
        Answered(200, {"content-type": "application/json"}, b'{"count": 5}'), welcome
    )
    app = App(engine, keep_reasoning=True)
    said = [{"role": r, "content": "x"} for r in ("user", "assistant", "system", "user")]
    for path, body in (
        ("/v1/messages/count_tokens", {"model": MODEL, "messages": said}),
        ("/v1/responses/input_tokens", {"input": said}),
    ):
        assert (await app.post(path, body)).json["input_tokens"] == 5
    await app.chat()
    *counts, served = engine.asked
    for asked in counts:
        assert asked.body["chat_template_kwargs"] == served.body["chat_template_kwargs"]
        assert [x["role"] for x in asked.body["messages"]].count("system") == 0
