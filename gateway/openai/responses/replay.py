"""The events of a response that is whole: the order of a live stream, each text in one piece."""

from __future__ import annotations

from collections.abc import Iterator

from engines.openai.messages import Json

_EVENTS = {"output_text": "response.output_text", "reasoning_text": "response.reasoning_text"}
# The field of a call that a model writes, and the event that reports it.
_WRITTEN = {
    "function_call": ("arguments", "response.function_call_arguments"),
    "custom_tool_call": ("input", "response.custom_tool_call_input"),
}


def replayed(response: Json) -> Iterator[Json]:
    """Yield the events of a stored response, without their numbers."""
    none_yet: Json = {"output": [], "usage": None, "completed_at": None, "incomplete_details": None}
    begun = {**response, **none_yet, "status": "in_progress"}
    for kind in ("response.created", "response.in_progress"):
        yield {"type": kind, "response": begun}
    for index, item in enumerate(response["output"]):
        yield {
            "type": "response.output_item.added",
            "output_index": index,
            "item": _opened(item),
        }
        yield from _call_events(index, item)
        yield from _part_events(index, item)
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{response['status']}", "response": response}


def _opened(item: Json) -> Json:
    empty: Json = {"status": "in_progress"} if "status" in item else {}
    if "content" in item:
        empty["content"] = []
    if item["type"] in _WRITTEN:
        empty[_WRITTEN[item["type"]][0]] = ""
    return {**item, **empty}


def _call_events(index: int, item: Json) -> Iterator[Json]:
    if item["type"] in _WRITTEN:
        field, event = _WRITTEN[item["type"]]
        where = {"item_id": item["id"], "output_index": index}
        named = {"name": item["name"]} if item["type"] == "function_call" else {}
        yield {"type": f"{event}.delta", **where, "delta": item[field]}
        yield {"type": f"{event}.done", **where, **named, field: item[field]}


def _part_events(index: int, item: Json) -> Iterator[Json]:
    for number, part in enumerate(item.get("content") or ()):
        where = {"item_id": item["id"], "output_index": index, "content_index": number}
        yield {"type": "response.content_part.added", **where, "part": {**part, "text": ""}}
        if event := _EVENTS.get(part["type"]):
            scores: Json = {"logprobs": []} if part["type"] == "output_text" else {}
            yield {"type": f"{event}.delta", **where, "delta": part["text"], **scores}
            yield {"type": f"{event}.done", **where, "text": part["text"], **scores}
        yield {"type": "response.content_part.done", **where, "part": part}
