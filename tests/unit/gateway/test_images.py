"""Images in three dialects: the same parts of a chat where the engine sees, else a clear 400."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from engines.wire import TemplateRules
from tests.stored_objects import stored_in
from tests.unit.gateway.in_process import MODEL, WELCOME, App, RecordingEngine, Reply, chat_answer

PNG = "data:image/png;base64,iVBORw0KGgo="
SHOWN = "(The result is the image in the next message.)"
FAR = "https://example.org/cat.png"
SEEING = msgspec.structs.replace(WELCOME, sees_images=True)
TOOL_USE = {"type": "tool_use", "id": "c1", "name": "read", "input": {}}
DIALECTS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
PATHS = [*DIALECTS, "/tokenize", "/v1/responses/input_tokens", "/v1/messages/count_tokens"]
HI = {"role": "user", "content": "hi"}


def app(rules: TemplateRules | None = None, **settings: Any) -> App:
    welcome = msgspec.structs.replace(SEEING, template=rules or TemplateRules())
    return App(RecordingEngine(welcome=welcome), **settings)


def source(url: str) -> dict[str, str]:
    if url.startswith("data:"):
        return {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    return {"type": "url", "url": url}


def image_part(path: str, url: Any) -> dict[str, Any]:
    """An image in the dialect of the path."""
    if path.startswith("/v1/messages"):
        return {"type": "image", "source": source(url) if isinstance(url, str) else url}
    if path.startswith("/v1/responses"):
        return {"type": "input_image", "image_url": url}
    return image_of(url)


def text_part(path: str, text: str) -> dict[str, Any]:
    return {"type": "input_text" if path.startswith("/v1/responses") else "text", "text": text}


def body_of(path: str, *turns: dict[str, Any]) -> dict[str, Any]:
    """A request with these messages."""
    name = "input" if path.startswith("/v1/responses") else "messages"
    return {"model": MODEL, "max_tokens": 5, name: [*turns]}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


def looking(path: str, url: str) -> list[dict[str, Any]]:
    """Parts that say "look", show an image, and say "well?"."""
    return [text_part(path, "look"), image_part(path, url), text_part(path, "well?")]


async def show(to: App, path: str, url: str) -> Reply:
    return await to.post(path, body_of(path, user(*looking(path, url))))


def heard(to: App) -> list[dict[str, Any]]:
    return list(to.engine.asked[-1].body["messages"])


def image_of(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize("path", PATHS)
async def test_an_engine_that_does_not_see_is_asked_nothing(path: str) -> None:
    to = App()
    reply = await show(to, path, PNG)
    assert reply.status == 400 and to.engine.asked == []
    said = reply.json["error"]["message"]
    assert "text only" in said and image_part(path, PNG)["type"] in said


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_other_servers_are_not_asked_unless_the_operator_says_so(dialect: str) -> None:
    to = app()
    reply = await show(to, dialect, FAR)
    assert reply.status == 400 and to.engine.asked == []
    assert "gateway.remote_images" in reply.json["error"]["message"]
    to = app(remote_images=True)
    await show(to, dialect, FAR)
    assert heard(to)[0]["content"][1] == image_of(FAR)


async def test_what_is_stored_has_the_image_for_the_next_turn(
    tmp_path: Path,
) -> None:
    stored, path = stored_in(tmp_path / "stored.sqlite"), "/v1/responses"
    to = App(RecordingEngine(chat_answer(), welcome=SEEING), stored=stored)
    first = await show(to, path, PNG)
    body = {"model": MODEL, "input": "and now?", "previous_response_id": first.json["id"]}
    assert (await to.post(path, body)).status == 200
    assert heard(to)[0]["content"][1] == image_of(PNG)
    await stored.close()


BAD = ["file:///etc/passwd", "", "ftp://x/y", "data:text/html;base64,AA==", "http:/x", "//host/x"]


@pytest.mark.parametrize("url", BAD)
@pytest.mark.parametrize("dialect", DIALECTS[:2])
async def test_no_other_address_reaches_the_engine(dialect: str, url: str) -> None:
    to = app(remote_images=True)
    reply = await show(to, dialect, url)
    assert reply.status == 400 and to.engine.asked == []
    assert "data:image/" in reply.error["message"]


NO_SOURCES: list[Any] = [
    *(None, 5, "x", {}, {"type": "base64"}, {"type": "file", "id": "f"}),
    *({"type": "base64", "media_type": "text/html", "data": "AA"}, {"type": "url", "url": 7}),
    *({"url": PNG}, {"type": "bogus", "url": PNG}, {"type": ["url"], "url": PNG}),
    {"type": "base64", "media_type": "image/png;base64,AA==", "data": "AA"},
    {"type": "base64", "media_type": "image/png\n", "data": "AA"},
]


@pytest.mark.parametrize("bad", NO_SOURCES)
async def test_a_source_that_is_none(bad: Any) -> None:
    to = app(remote_images=True)
    shown = user({"type": "image", "source": bad})
    reply = await to.post("/v1/messages", body_of("/v1/messages", shown))
    assert (reply.status, reply.json["type"]) == (400, "error")
    assert reply.json["error"]["type"] == "invalid_request_error"
    assert reply.json["error"]["message"].startswith("messages[0].content[0]")
    assert to.engine.asked == []


async def test_images_of_tools_come_after_all_results() -> None:
    to = app()
    image = {"type": "image", "source": source(PNG)}
    uses = [{"type": "tool_use", "id": id, "name": "read", "input": {}} for id in ("c1", "c2")]
    results = [
        {"type": "tool_result", "tool_use_id": "c1", "content": [image]},
        {"type": "tool_result", "tool_use_id": "c2", "content": "done"},
    ]
    talk = [("user", "read"), ("assistant", uses), ("user", results)]
    messages = [{"role": role, "content": content} for role, content in talk]
    await to.post("/v1/messages", {"model": MODEL, "max_tokens": 5, "messages": messages})
    anthropic = heard(to)
    assert [x["role"] for x in anthropic] == ["user", "assistant", "tool", "tool", "user"]
    assert "next message" in anthropic[2]["content"] and anthropic[3]["content"] == "done"
    assert anthropic[4]["content"] == [image_of(PNG)]
    call = {"type": "function_call", "name": "read", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1"}
    items = [
        {"role": "user", "content": "read"},
        *({**call, "call_id": id} for id in ("c1", "c2")),
        {**output, "output": [{"type": "input_image", "image_url": PNG}]},
        {**output, "call_id": "c2", "output": "done"},
    ]
    await to.post("/v1/responses", {"model": MODEL, "input": items})
    assert heard(to) == anthropic  # the same conversation is the same prompt


async def test_an_image_of_a_result_stays_before_what_came_later() -> None:
    to, path = app(), "/v1/responses"
    body = after_a_tool(path, [image_part(path, PNG)])
    await to.post(path, {**body, "input": [*body["input"], HI]})
    assert [x["role"] for x in heard(to)] == ["user", "assistant", "tool", "user", "user"]
    assert heard(to)[3]["content"] == [image_of(PNG)]


IMAGE = "(An image was left out here: it cannot be shown to this model.)"
FILE = "(A file was left out here: it cannot be shown to this model.)"


def after_a_tool(path: str, parts: Any) -> dict[str, Any]:
    """The body of a request whose last message is a tool's result."""
    body: dict[str, Any] = {"model": MODEL}
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    if path in ("/v1/chat/completions", "/tokenize"):
        result = {"role": "tool", "tool_call_id": "c1", "content": parts}
        return body | {"messages": [HI, {"role": "assistant", "tool_calls": [call]}, result]}
    if path.startswith("/v1/responses"):
        called = {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"}
        output = {"type": "function_call_output", "call_id": "c1", "output": parts}
        return body | {"input": [HI, called, output]}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": parts}
    use = {"role": "assistant", "content": [{**TOOL_USE}]}
    return body | {"max_tokens": 5, "messages": [HI, use, {"role": "user", "content": [result]}]}


def result_parts(path: str, image: Any) -> list[dict[str, Any]]:
    """Text, an image and a file, as a tool gives them in a dialect."""
    file: dict[str, Any] = {"type": "file", "file": {}}
    if path.startswith("/v1/responses"):
        file = {"type": "input_file"}
    elif path.startswith("/v1/messages"):
        pdf = {"type": "base64", "media_type": "application/pdf"}
        file = {"type": "document", "source": pdf}
    return [text_part(path, "seen"), image_part(path, image), file]


def text_of(message: dict[str, Any]) -> str:
    said = message["content"]
    return said if isinstance(said, str) else "\n".join(x["text"] for x in said)


@pytest.mark.parametrize("image", [PNG, FAR, 7])
@pytest.mark.parametrize("path", PATHS)
async def test_a_result_with_an_image_or_a_file_is_taken_without_it(path: str, image: Any) -> None:
    to = App()
    await to.post(path, after_a_tool(path, result_parts(path, image)))
    *_, result = heard(to)
    assert (result["role"], text_of(result)) == ("tool", f"seen\n{IMAGE}\n{FILE}")
    to = app()
    await to.post(path, after_a_tool(path, result_parts(path, image)))
    shown = [x for y in heard(to) for x in y.get("content") or () if isinstance(x, dict)]
    assert (image_of(PNG) in shown) == (image == PNG)


# MCP's image has ``data`` beside its type; agents pass it on as it came.
OF_OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"type": "image", "data": "aGk=", "mimeType": "image/png"}, IMAGE),
    ({"type": "image", "source": source(PNG)}, IMAGE),
    ({"type": "image_url", "image_url": {"url": PNG}}, IMAGE),
    ({"type": "input_image", "image_url": PNG}, IMAGE),
    ({"type": "image_file", "image_file": {}}, IMAGE),
    ({"type": "document", "source": {"type": "base64", "data": "aGk="}}, FILE),
    ({"type": "file", "file": {"file_data": "aGk="}}, FILE),
    ({"type": "audio", "data": "aGk="}, FILE),
    ({"type": "resource", "resource": {"uri": "a:b", "blob": "aGk="}}, FILE),
]


@pytest.mark.parametrize("path", PATHS)
async def test_a_result_in_the_parts_of_another_dialect_ends_no_conversation(path: str) -> None:
    for part, wanted in [*OF_OTHERS, ({"type": "output_text", "text": "more"}, "more")]:
        to = App()
        await to.post(path, after_a_tool(path, [text_part(path, "seen"), part]))
        assert text_of(heard(to)[-1]).replace("seen", "").strip() == wanted


@pytest.mark.parametrize(("part", "wanted"), OF_OTHERS)
async def test_only_images_or_files_of_another_dialect_are_a_content(part, wanted):
    """Their base64 went into the prompt as a text."""
    to = App()
    for given in ([part], {"content": [part], "isError": False}):
        await to.post("/v1/responses", after_a_tool("/v1/responses", given))
        assert heard(to)[-1]["content"] == wanted


@pytest.mark.parametrize("to", [App(), app()])
@pytest.mark.parametrize("path", PATHS)
async def test_an_image_that_another_model_answered_with_ends_no_conversation(path, to):
    """A client goes on with a text model; no template has a place for an assistant's image."""
    kind = "output_text" if path.startswith("/v1/responses") else "text"
    said = [{"type": kind, "text": "Here:"}]
    media: list[tuple[dict[str, Any], str]] = [
        *((x, IMAGE if "image" in x["type"] else FILE) for x in result_parts(path, PNG)[1:]),
        ({"type": "output_image", "image_url": PNG}, IMAGE),
        ({"type": "image_url", "image_url": {"url": FAR}}, IMAGE),
        ({"type": "input_audio", "input_audio": {}}, FILE),
    ]
    for part, sentence in media:
        answer = {"role": "assistant", "content": [*said, part]}
        await to.post(path, body_of(path, HI, answer, HI))
        content = heard(to)[1]["content"]
        assert content in (
            f"Here:{sentence}",
            [{"type": "text", "text": x} for x in ("Here:", sentence)],
        )


@pytest.mark.parametrize("role", ["assistant", "tool"])
@pytest.mark.parametrize("content", ["Here:", [{"type": "text", "text": "Here:"}], None])
async def test_images_beside_a_content_are_left_out_as_well(role: str, content: Any) -> None:
    """Ollama and OpenRouter have them there; a user's are refused (``test_foreign_fields``)."""
    said = {"role": role, "content": content, "images": ["aGk=", {"type": "image_url"}]}
    first = after_a_tool("/v1/chat/completions", "seen")["messages"][:2]
    to = App()
    body = {"model": MODEL, "messages": [*first, {**said, "tool_call_id": "c1"}, HI]}
    await to.post("/v1/chat/completions", body)
    shown = [x["text"] for x in heard(to)[2]["content"]]
    assert shown == [*["Here:"][: content is not None], IMAGE, IMAGE]
    assert "images" not in heard(to)[2]


@pytest.mark.parametrize("place", ["answer", "result"])
async def test_what_is_left_out_is_counted(place: str) -> None:
    to = App()
    for path in DIALECTS:
        parts = result_parts(path, PNG)
        said = {"role": "assistant", "content": parts}
        of_answer = body_of(path, said, HI)
        await to.post(path, of_answer if place == "answer" else after_a_tool(path, parts))
    figures = (await to.get("/metrics")).body.decode()
    for kind in ("image", "file"):
        assert f'thermocline_left_out_total{{kind="{place}_{kind}"}} 3' in figures


@pytest.mark.parametrize("kind", ["odd", "computer_screenshot", "image_urls"])
async def test_other_parts_of_answers_are_refused(kind: str) -> None:
    said = {"role": "assistant", "content": [{"type": kind, "x": 5}]}
    for path in DIALECTS[:2]:
        assert (await App().post(path, body_of(path, said))).status == 400


@pytest.mark.parametrize("path", DIALECTS)
async def test_an_image_of_another_dialect_in_a_users_message_is_refused(path: str) -> None:
    to, name = App(), "input" if path == "/v1/responses" else "messages"
    images = [x for x, _ in OF_OTHERS[:4]]
    for part in [*images, {"type": "input_audio", "input_audio": {}}]:
        reply = await to.post(path, body_of(path, user(part)))
        assert (reply.status, to.engine.asked) == (400, [])
        assert f"{name}[0].content[0]" in reply.json["error"]["message"]


@pytest.mark.parametrize("path", [x for x in PATHS if x.startswith("/v1/messages")])
async def test_a_search_result_with_an_image_ends_no_conversation(path: str) -> None:
    found = {"type": "search_result", "title": "t", "source": "s"}
    to = App()
    image = {"type": "image", "source": source(PNG)}
    await to.post(path, after_a_tool(path, [{**found, "content": [image]}]))
    assert text_of(heard(to)[-1]) == FILE
    await to.post(path, after_a_tool(path, [{**found, "content": [{"type": "text", "text": "x"}]}]))
    assert text_of(heard(to)[-1]) == "t\ns\nx"


async def test_a_list_that_a_tool_gave_is_no_content() -> None:
    to = App()
    found: list[dict[str, Any]] = [{"type": "document", "title": "t", "source": "s", "data": "d"}]
    for given in ([{"type": "dir", "name": "a"}, {"type": "file", "name": "b"}], found):
        await to.post("/v1/responses", after_a_tool("/v1/responses", given))
        assert msgspec.json.decode(heard(to)[-1]["content"]) == given


@pytest.mark.parametrize("shown", [PNG, None])
async def test_a_screenshot_of_a_computer_is_an_image(shown: str | None) -> None:
    screenshot = {"type": "computer_screenshot", "image_url": shown, "file_id": "f"}
    for to, wanted in ((App(), IMAGE), (app(), SHOWN if shown else IMAGE)):
        await to.post("/v1/responses", after_a_tool("/v1/responses", screenshot))
        assert heard(to)[2]["content"] == wanted


@pytest.mark.parametrize("part", [5, "x", {}, {"type": ["text"]}, {"type": {}}, {"type": "odd"}])
@pytest.mark.parametrize("path", PATHS)
async def test_odd_parts_of_results_are_refused_or_left_out(path: str, part: Any) -> None:
    to = App()
    reply = await to.post(path, after_a_tool(path, [part]))
    assert to.engine.asked or reply.status == 400


async def test_an_image_survives_where_users_messages_are_joined() -> None:
    to = app(TemplateRules(inline_system=False, repeated_users=False))
    shown = {"type": "input_image", "image_url": PNG}
    items = [
        {"role": "user", "content": [shown]},
        {"role": "user", "content": "what is it?"},
        {"role": "developer", "content": "be brief"},
    ]
    await to.post("/v1/responses", {"model": MODEL, "input": items})
    (message,) = heard(to)
    image, text = message["content"]
    assert image == image_of(PNG)
    assert text["text"].startswith("what is it?\n\n") and "be brief" in text["text"]


@pytest.mark.parametrize("role", ["system", "developer"])
async def test_only_users_and_tools_show_images(role: str) -> None:
    to = app()
    for path in ("/v1/chat/completions", "/tokenize", "/v1/responses"):
        said = {"role": role, "content": [image_part(path, PNG)]}
        reply = await to.post(path, body_of(path, HI, said))
        assert reply.status == 400, path
        if path != "/v1/responses":
            assert reply.error["param"] == "messages[1].content[0].type"
            assert role in reply.error["message"]
    body = body_of("/v1/messages", HI) | {"system": [image_part("/v1/messages", PNG)]}
    assert (await to.post("/v1/messages", body)).status == 400
    assert to.engine.asked == []


async def test_detail_is_passed_on_and_files_are_refused() -> None:
    to, path = app(), "/v1/responses"
    await to.post(path, body_of(path, user({**image_part(path, PNG), "detail": "high"})))
    assert heard(to)[0]["content"][0]["image_url"] == {"url": PNG, "detail": "high"}
    reply = await to.post(path, body_of(path, user({"type": "input_image", "file_id": "file-1"})))
    assert (reply.status, reply.error["param"]) == (400, "input[0].content[0].file_id")


MEANT_FOR_VLLM: dict[str, Any] = {
    "uuid": "of-another-tenant",
    "video_url": {"url": "http://169.254.169.254/x.mp4"},
    "image_pil": None,
    "image_embeds": None,
    "cache_control": {"type": "ephemeral"},
}


@pytest.mark.parametrize("path", PATHS)
async def test_an_engine_is_shown_it_in_its_place_and_no_field_that_was_not_checked(path):
    """vLLM fetches the URL in a part, and its ``uuid`` is the image's hash for everybody."""
    to, parts = app(), looking(path, PNG)
    if isinstance(inner := parts[1].get("image_url"), dict):
        inner |= {"detail": "low", **MEANT_FOR_VLLM}
    else:
        parts[1]["detail"] = "low"
    await to.post(path, body_of(path, user(*({**part, **MEANT_FOR_VLLM} for part in parts))))
    shown = image_of(PNG)
    if not path.startswith("/v1/messages"):
        shown["image_url"]["detail"] = "low"
    look, well = ({"type": "text", "text": x} for x in ("look", "well?"))
    assert heard(to) == [user(look, shown, well)]


async def test_other_roles_parts_are_made_anew_too_and_nothing_else_is_touched() -> None:
    to = app()
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    roles: list[dict[str, Any]] = [
        {"role": "system"},
        {"role": "user", "name": "Eve"},
        {"role": "assistant", "reasoning": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c"},
    ]
    part = {"type": "text", "text": "hi"}
    sent = [{**x, "content": [{**part, **MEANT_FOR_VLLM}]} for x in roles]
    no = {"type": "refusal", "refusal": "no"}
    sent.append({"role": "assistant", "content": [{**no, **MEANT_FOR_VLLM}], "extra": 1})
    sent.append({"role": "user", "content": "and as a text"})
    for path in ("/v1/chat/completions", "/tokenize"):
        await to.post(path, {"model": MODEL, "messages": sent})
        wanted = [{**x, "content": [part]} for x in roles]
        assert heard(to)[:4] == wanted
        assert heard(to)[4:] == [{"role": "assistant", "content": [no], "extra": 1}, sent[-1]]


@pytest.mark.parametrize("name", ["mm_processor_kwargs", "media_io_kwargs"])
async def test_how_an_image_is_read_is_not_a_clients_to_say(name: str) -> None:
    to = app()
    asked: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
        "/v1/completions": {"prompt": "hi"},
    }
    for path, body in asked.items():
        reply = await to.post(path, {"model": MODEL, **body, name: {"image": {"x": 1}}})
        assert (reply.status, reply.error["param"]) == (400, name)
        assert to.engine.asked == []
    for path, body in {**asked, "/tokenize": asked["/v1/chat/completions"]}.items():
        private = {"ec_transfer_params": {"a": 1}, "mm_payload": "x"}
        await to.post(path, {"model": MODEL, **body, name: {}, **private})
        assert not {name, *private} & to.engine.asked.pop().body.keys()


@pytest.mark.parametrize("messages", [5, [5], [{"role": "user", "content": [MEANT_FOR_VLLM]}]])
async def test_a_text_brings_no_messages(messages: Any) -> None:
    to = app()
    await to.post("/v1/completions", {"model": MODEL, "prompt": "hi", "messages": messages})
    assert "messages" not in to.engine.asked[-1].body
