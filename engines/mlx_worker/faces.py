"""What a reply looks like from outside: OpenAI's objects and chunks, for chat and for text."""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from engines.mlx_worker import sse
from engines.mlx_worker.answer import Delta, ShownReason
from engines.mlx_worker.calls import CallPart
from engines.mlx_worker.reply import Ended, Progress, Reply, Shown
from engines.mlx_worker.scores import Score, chat_logprobs, text_logprobs
from engines.mlx_worker.vocabulary import Vocabulary
from engines.openai import ChatRequest, CompletionRequest

Body: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Served:
    """Who is answering; the same in every reply of a process."""

    model: str
    fingerprint: str
    vocabulary: Vocabulary


@dataclass
class Whole:
    """All deltas of one choice together."""

    content: str = ""
    reasoning: str = ""
    parts: list[CallPart] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    reason: ShownReason = "stop"

    def add(self, delta: Delta) -> None:
        self.content += delta.content
        self.reasoning += delta.reasoning
        self.parts += delta.calls
        self.scores += delta.scores


class Face(Protocol):
    """One request's way of being answered."""

    num_choices: int
    include_usage: bool

    def openings(self) -> Sequence[Body]:
        """Chunks before the first token."""

    def chunk(self, choice: int, delta: Delta) -> Body: ...

    def last_chunk(self, choice: int, reason: ShownReason) -> Body: ...

    def usage_chunk(self, usage: Body) -> Body: ...

    def whole(self, choices: Sequence[Whole], usage: Body) -> Body: ...


async def chunks(face: Face, reply: Reply) -> AsyncIterator[bytes]:
    """The events of a streamed reply. Raises as ``Reply.steps`` does."""
    for body in face.openings():
        yield sse.event(body)
    async for step in reply.steps():
        match step:
            case Shown():
                yield sse.event(face.chunk(step.choice, step.delta))
            case Ended():
                yield sse.event(face.last_chunk(step.choice, step.reason))
            case Progress():
                yield sse.comment(f"prefill {step.done}/{step.total}")
    if face.include_usage:
        yield sse.event(face.usage_chunk(reply.usage()))
    yield sse.DONE


async def collected(face: Face, reply: Reply) -> Body:
    """The object of a reply in one piece. Raises as ``Reply.steps`` does."""
    choices = [Whole() for _ in range(face.num_choices)]
    async for step in reply.steps():
        match step:
            case Shown():
                choices[step.choice].add(step.delta)
            case Ended():
                choices[step.choice].reason = step.reason
    return face.whole(choices, reply.usage())


class _Envelope:
    """What all chunks of one reply share."""

    def __init__(self, served: Served, id_: str, kind: str, usage_wanted: bool) -> None:
        self._fixed: Body = {
            "id": id_,
            "object": kind,
            "created": int(time.time()),
            "model": served.model,
            "system_fingerprint": served.fingerprint,
        }
        # Asked for usage, a client expects the key in every chunk.
        self._no_usage: Body = {"usage": None} if usage_wanted else {}

    def chunk(self, *choices: Body) -> Body:
        return {**self._fixed, "choices": list(choices), **self._no_usage}

    def last(self, choices: Sequence[Body], usage: Body) -> Body:
        return {**self._fixed, "choices": list(choices), "usage": usage}


class ChatFace:
    def __init__(self, served: Served, request: ChatRequest) -> None:
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        id_ = f"chatcmpl-{uuid.uuid4().hex}"
        self._envelope = _Envelope(served, id_, kind, request.include_usage)
        self._vocabulary = served.vocabulary
        self._logprobs = bool(request.logprobs)
        self.num_choices = request.num_choices
        self.include_usage = request.include_usage

    def openings(self) -> Sequence[Body]:
        first = {"role": "assistant", "content": "", "refusal": None}
        return [self._chunk(i, first) for i in range(self.num_choices)]

    def chunk(self, choice: int, delta: Delta) -> Body:
        said: Body = {}
        if delta.reasoning:
            said["reasoning_content"] = delta.reasoning
        if delta.content or not (delta.reasoning or delta.calls):
            said["content"] = delta.content
        if delta.calls:
            said["tool_calls"] = [
                {"index": i, **call} for i, call in sorted(merged_calls(delta.calls).items())
            ]
        return self._chunk(choice, said, scores=delta.scores)

    def last_chunk(self, choice: int, reason: ShownReason) -> Body:
        return self._chunk(choice, {}, reason=reason)

    def usage_chunk(self, usage: Body) -> Body:
        return self._envelope.last([], usage)

    def whole(self, choices: Sequence[Whole], usage: Body) -> Body:
        return self._envelope.last([self._choice(i, x) for i, x in enumerate(choices)], usage)

    def _chunk(
        self,
        choice: int,
        said: Body,
        reason: ShownReason | None = None,
        scores: Sequence[Score] = (),
    ) -> Body:
        logprobs = chat_logprobs(scores, self._vocabulary) if scores else None
        return self._envelope.chunk(
            {"index": choice, "delta": said, "logprobs": logprobs, "finish_reason": reason}
        )

    def _choice(self, index: int, whole: Whole) -> Body:
        calls = [call for _, call in sorted(merged_calls(whole.parts).items())]
        message: Body = {
            "role": "assistant",
            "content": None if calls and not whole.content else whole.content,
            "refusal": None,
        }
        if whole.reasoning:
            message["reasoning_content"] = whole.reasoning
        if calls:
            message["tool_calls"] = calls
        logprobs = chat_logprobs(whole.scores, self._vocabulary) if self._logprobs else None
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": whole.reason,
        }


def merged_calls(parts: Sequence[CallPart]) -> dict[int, Body]:
    """Pieces of calls by the call's number; a client adds up what several chunks say of one."""
    calls: dict[int, Body] = defaultdict(lambda: {"function": {"arguments": ""}})
    for part in parts:
        call = calls[part.index]
        if part.name:
            call["id"], call["type"] = part.id, "function"
            call["function"]["name"] = part.name
        call["function"]["arguments"] += part.arguments
    return calls


class TextFace:
    """/v1/completions; ``prompts`` are the texts to echo, one per generation."""

    def __init__(self, served: Served, request: CompletionRequest, prompts: Sequence[str]) -> None:
        id_ = f"cmpl-{uuid.uuid4().hex}"
        self._envelope = _Envelope(served, id_, "text_completion", request.include_usage)
        self._vocabulary = served.vocabulary
        self._logprobs = request.logprobs is not None
        self._echoes = [x for x in prompts for _ in range(request.num_choices)]
        self.num_choices = len(request.prompts) * request.num_choices
        self.include_usage = request.include_usage

    def openings(self) -> Sequence[Body]:
        return [self._envelope.chunk(self._choice(i, x)) for i, x in enumerate(self._echoes)]

    def chunk(self, choice: int, delta: Delta) -> Body:
        return self._envelope.chunk(self._choice(choice, delta.content, delta.scores))

    def last_chunk(self, choice: int, reason: ShownReason) -> Body:
        return self._envelope.chunk(self._choice(choice, "", reason=reason))

    def usage_chunk(self, usage: Body) -> Body:
        return self._envelope.last([], usage)

    def whole(self, choices: Sequence[Whole], usage: Body) -> Body:
        echoes = self._echoes or [""] * len(choices)
        shown = [
            self._choice(i, echo + x.content, x.scores, x.reason, whole=True)
            for i, (echo, x) in enumerate(zip(echoes, choices, strict=True))
        ]
        return self._envelope.last(shown, usage)

    def _choice(
        self,
        index: int,
        text: str,
        scores: Sequence[Score] = (),
        reason: ShownReason | None = None,
        whole: bool = False,
    ) -> Body:
        wanted = self._logprobs and (whole or bool(scores))
        return {
            "index": index,
            "text": text,
            "logprobs": text_logprobs(scores, self._vocabulary) if wanted else None,
            "finish_reason": reason,
        }
