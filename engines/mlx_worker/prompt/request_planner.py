"""Plans a checked request: its generations, and the output processors of their answers.

Plans are made on one thread: templates hold the GIL, and tokenizers are not fully thread-safe, so
more threads would not help. A piece of work is short (some texts to embed, or one prompt that fits
the context), and requests take turns with their pieces. A request with a small body skips the
queue: it waits for at most one long piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Final, TypeVar

from engines.host.control_tokens import UnreadableText, panics_refused
from engines.host.work_line import WorkLine, to_its_end
from engines.mlx_worker.answer.output_processor import (
    AnswerText,
    OutputProcessor,
    chat_sections,
    plain_sections,
)
from engines.mlx_worker.answer.reply import RequestPlan
from engines.mlx_worker.generation import Generation, ModelFacts
from engines.mlx_worker.grammar import Grammar, GrammarProcessor
from engines.mlx_worker.model.loading import Vocabulary
from engines.mlx_worker.prompt.chat_template import PromptWriter
from engines.mlx_worker.prompt.sampling import sampling_of
from engines.mlx_worker.prompt.tools import plan_tools
from engines.openai.errors import InvalidRequest
from engines.openai.requests import Body, ChatRequest, CompletionRequest
from kvstore.session import SessionRef

T = TypeVar("T")

MAX_WAITING: Final = 1024  # requests
SMALL_CHARS: Final = 1 << 13  # largest body that skips the queue
# OpenAI's default length of a text completion.
_TEXT_TOKENS = 16


class Planning:
    """The planning thread, and the queue for it; belongs to the event loop."""

    def __init__(self, first: Callable[[], object]) -> None:
        """``first`` runs on the thread before all requests."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompt")
        self._line = WorkLine(MAX_WAITING)
        self._thread.submit(first)

    def close(self) -> None:
        """Drop the work that waits; running work continues to its end."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def do(self, work: Callable[[], T], size: int) -> T:
        """Run ``work`` on the thread and return its result.

        A caller that is cancelled before its turn leaves the queue.

        Args:
            size: size of the body or the texts, in bytes or characters.

        Raises:
            QueueFull: too many requests wait.
            InvalidRequest: raised by ``work``; or the body is nested too deeply, or the tokenizer
                cannot read a text.
        """
        async with self._line.turn() if size > SMALL_CHARS else nullcontext():
            loop = asyncio.get_running_loop()
            work_done = loop.run_in_executor(self._thread, partial(_without_panic, work))
            try:
                return await to_its_end(work_done)
            except UnreadableText as error:
                raise InvalidRequest(f"{error}") from error
            except RecursionError as error:  # a schema just shallow enough for the parser
                raise InvalidRequest("The JSON body is nested too deeply.") from error


def _without_panic(work: Callable[[], T]) -> T:
    with panics_refused():
        return work()


class RequestPlanner:
    """Plans requests for one model; not thread-safe, and too slow for the event loop."""

    def __init__(self, vocabulary: Vocabulary, facts: ModelFacts) -> None:
        self._vocabulary = vocabulary
        self._facts = facts
        self._prompts = PromptWriter(vocabulary, facts.max_context)

    def chat(
        self, request: ChatRequest, session: SessionRef | None, grammar: Grammar | None = None
    ) -> RequestPlan:
        """Return the plan of a chat.

        Args:
            grammar: the compiled grammar that the request asks for (``tools.grammar_wanted``).

        Raises:
            InvalidRequest: this model cannot serve the request.
        """
        self._check(request)
        request = self._facts.usual_sampling.filled_in(request)
        tools = plan_tools(request, self._vocabulary, grammar is not None)
        prompt = self._prompts.chat(request, tools, session.salt if session else None)
        plan, num_tokens = RequestPlan(request.num_choices), len(prompt.token_ids)
        grammars: list[GrammarProcessor | None] = [None] * plan.num_choices
        if grammar is not None:
            ends = self._vocabulary.tokenizer.think_end_tokens
            after = tuple(ends) if prompt.thinking else None
            plan.grammars = [grammar.processor(num_tokens, after) for _ in grammars]
            grammars = [*plan.grammars]
        limit = self._limit(request.answer_tokens, num_tokens)
        shows_eos = request.ignore_eos and grammar is None
        plan.generations.append(
            Generation(
                prompt=prompt.token_ids,
                sampling=sampling_of(request, num_tokens, grammars),
                max_tokens=max(limit, 1),
                stop_sequences=self._ends(shows_eos),
                session=session,
                boundaries=prompt.boundaries,
                top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            )
        )
        plan.outputs = [
            OutputProcessor(
                AnswerText(self._vocabulary, prompt.token_ids, shows_eos),
                chat_sections(self._vocabulary, tools.marked, prompt.thinking),
                request.stops,
                calls=tools.reader(),
                one_call=tools.marked and request.parallel_tool_calls is False,
                silent=limit == 0,
                keeps_scores=bool(request.logprobs),
            )
            for _ in range(plan.num_choices)
        ]
        return plan

    def text(self, request: CompletionRequest, session: SessionRef | None) -> RequestPlan:
        """Return the plan of a text completion; the session is used only if there is one prompt.

        Raises ``InvalidRequest`` for a request that this model cannot serve.
        """
        self._check(request)
        _check_text(request)
        request = self._facts.usual_sampling.filled_in(request)
        plan = RequestPlan(request.num_choices)
        only = session if len(request.prompts) == 1 else None
        wanted = _TEXT_TOKENS if request.max_tokens is None else request.max_tokens
        for prompt in request.prompts:
            if isinstance(prompt, str):
                ids = self._prompts.text(prompt)
            else:
                ids = self._prompts.checked(prompt, "prompt")
            limit = self._limit(wanted, len(ids))
            plan.generations.append(
                Generation(
                    prompt=ids,
                    sampling=sampling_of(request, len(ids), [None] * plan.num_choices),
                    max_tokens=max(limit, 1),
                    stop_sequences=self._ends(request.ignore_eos),
                    session=only,
                    top_logprobs=request.logprobs,
                )
            )
            plan.outputs += [
                OutputProcessor(
                    AnswerText(self._vocabulary, ids, request.ignore_eos),
                    plain_sections(),
                    request.stops,
                    silent=limit == 0,
                    keeps_scores=request.logprobs is not None,
                )
                for _ in range(plan.num_choices)
            ]
        return plan

    def _limit(self, wanted: int | None, prompt_tokens: int) -> int:
        """Return the most tokens of an answer: those asked for, limited by the context."""
        room = self._facts.max_context - prompt_tokens
        return room if wanted is None else min(wanted, room)

    def _ends(self, ignored: bool) -> list[tuple[int, ...]]:
        return [] if ignored else [(token,) for token in sorted(self._vocabulary.eos)]

    def _check(self, body: Body) -> None:
        """Raise ``InvalidRequest`` for fields that only vLLM supports, and unknown token ids."""
        if body.min_tokens:
            raise _refusal("min_tokens", "this engine does not support it: leave it out")
        if max(body.bias, default=0) >= self._vocabulary.size:
            known = f"outside the vocabulary of {self._vocabulary.size}."
            raise _refusal("logit_bias", f"a token id is {known}")


def _check_text(request: CompletionRequest) -> None:
    chats_only = "this engine supports it for chats only: send a chat"
    if request.echo and request.logprobs is not None:
        raise _refusal("echo", "this engine gives no logprobs of prompts: drop echo or logprobs")
    if request.response_format is not None and request.response_format.type != "text":
        raise _refusal("response_format", chats_only)
    if request.structured_outputs:
        raise _refusal("structured_outputs", chats_only)


def _refusal(field: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {why}", field)
