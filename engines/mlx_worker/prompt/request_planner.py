"""Plans a checked request: the generations to ask for, and the readers of their answers.

Plans are made on one thread. Templates hold the GIL, and tokenizers are not fully thread-safe, so
one thread is all that helps. A piece of work is short (some texts to embed, or one prompt that
fits the context), and requests take turns with their pieces. A request with a small body goes
straight to the thread: it waits for one long piece at most.
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
SMALL_CHARS: Final = 1 << 13
# OpenAI's default length of a text completion.
_TEXT_TOKENS = 16


class Planning:
    """The thread, and the line of requests that wait for it. Belongs to the event loop."""

    def __init__(self, first: Callable[[], object]) -> None:
        """``first`` is done ahead of all requests."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompt")
        self._line = WorkLine(MAX_WAITING)
        self._thread.submit(first)

    def close(self) -> None:
        """Drop what waits; what runs goes on to its end."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def do(self, work: Callable[[], T], size: int) -> T:
        """Do ``work`` on the thread; ``size``: of its body or texts, in bytes or characters.

        A caller that is cancelled before its turn leaves the line.

        Raises:
            QueueFull: too many requests wait.
            InvalidRequest: what ``work`` raises, the body is nested too deeply for it, or the
                tokenizer cannot read a text.
        """
        async with self._line.turn() if size > SMALL_CHARS else nullcontext():
            loop = asyncio.get_running_loop()
            work_done = loop.run_in_executor(self._thread, partial(_without_panic, work))
            try:
                return await to_its_end(work_done)
            except UnreadableText as error:
                raise InvalidRequest(f"{error}") from error
            except RecursionError as error:  # a schema just shallow enough to have been parsed
                raise InvalidRequest("The JSON body is nested too deeply.") from error


def _without_panic(work: Callable[[], T]) -> T:
    with panics_refused():
        return work()


class RequestPlanner:
    """Plans requests for one model. Slow (templates, tokenizers): not for the event loop.

    Not thread-safe: one call at a time.
    """

    def __init__(self, vocabulary: Vocabulary, facts: ModelFacts) -> None:
        self._vocabulary = vocabulary
        self._facts = facts
        self._prompts = PromptWriter(vocabulary, facts.max_context)

    def chat(
        self, request: ChatRequest, session: SessionRef | None, grammar: Grammar | None = None
    ) -> RequestPlan:
        """Plan a chat; ``grammar``: the one that it wants (``tools.grammar_wanted``), compiled.

        Raises:
            InvalidRequest: this model cannot do it.
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
        """Plan a text completion; a session is kept for a single prompt only.

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
        """The length of an answer in tokens: what was asked for, as far as the context has room."""
        room = self._facts.max_context - prompt_tokens
        return room if wanted is None else min(wanted, room)

    def _ends(self, ignored: bool) -> list[tuple[int, ...]]:
        return [] if ignored else [(token,) for token in sorted(self._vocabulary.eos)]

    def _check(self, body: Body) -> None:
        """Refuse what only vLLM can do, and tokens that there are not."""
        if body.min_tokens:
            raise _cannot("min_tokens", "this engine cannot do that: leave it out")
        if max(body.bias, default=0) >= self._vocabulary.size:
            known = f"outside the vocabulary of {self._vocabulary.size}."
            raise _cannot("logit_bias", f"a token id is {known}")


def _check_text(request: CompletionRequest) -> None:
    none_here = "a text completion has none here: send a chat"
    if request.echo and request.logprobs is not None:
        raise _cannot("echo", "the prompt has no logprobs here: drop echo or logprobs")
    if request.response_format is not None and request.response_format.type != "text":
        raise _cannot("response_format", none_here)
    if request.structured_outputs:
        raise _cannot("structured_outputs", none_here)


def _cannot(field: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {why}", field)
