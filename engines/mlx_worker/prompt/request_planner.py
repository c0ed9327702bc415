"""Plans a checked request: the generations to ask for, and the readers of their answers.

Plans are made on one thread. Templates hold the GIL, and tokenizers are not fully thread-safe, so
one thread is all that helps. A piece of work is short (``PIECE_CHARS`` of text, or one prompt that
fits the context), and requests take turns with their pieces. A request with a small body goes
straight to the thread: it waits for one long piece at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any, Final, TypeVar

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import (
    make_frequency_penalty,
    make_logits_processors,
    make_presence_penalty,
    make_repetition_penalty,
)

from engines.host.control_tokens import UnreadableText, panics_refused
from engines.host.work_line import WorkLine, to_its_end
from engines.mlx_worker.answer.output_processor import (
    AnswerText,
    OutputProcessor,
    chat_sections,
    plain_sections,
)
from engines.mlx_worker.answer.reply import RequestPlan
from engines.mlx_worker.generation import (
    Generation,
    LogitsProcessor,
    ModelFacts,
    SequenceSampling,
)
from engines.mlx_worker.grammar import Grammar, GrammarProcessor
from engines.mlx_worker.model.loading import Vocabulary
from engines.mlx_worker.prompt.chat_template import ChatPrompt, PromptWriter
from engines.mlx_worker.prompt.sampling import SamplingParams, fresh_seed, make_sampler
from engines.mlx_worker.prompt.tools import ToolPlan, plan_tools
from engines.openai.errors import InvalidRequest, context_too_long
from engines.openai.requests import (
    MAX_EMBEDDED_TOKENS,
    Body,
    ChatRequest,
    CompletionRequest,
    EmbeddingsRequest,
)
from kvstore.session import SessionRef

T = TypeVar("T")

MAX_WAITING: Final = 1024  # requests
PIECE_CHARS: Final = 1 << 16  # of texts that are tokenized together, some 50 ms
SMALL_CHARS: Final = 1 << 13
_ALL_TOKENS = 1 << 30
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

    async def tokens_of(
        self, asked: EmbeddingsRequest, vocabulary: Vocabulary, facts: ModelFacts
    ) -> list[list[int]]:
        """Tokenize what is to be embedded, with the tokens that the tokenizer adds by itself.

        It ends with the piece that exceeds a bound.

        Raises:
            InvalidRequest: more tokens than may be embedded at once, a text that the context cannot
                hold or that has no tokens, or an id outside the vocabulary.
        """
        check_size(asked, vocabulary.max_token_chars, facts.max_context)
        encode = partial(_encoded, vocabulary.tokenizer)
        texts: list[list[int]] = []
        num_tokens = 0
        for piece in pieces(asked.inputs):
            found = await self.do(partial(encode, piece), sum(map(len, piece)))
            num_tokens += sum(map(len, found))
            if num_tokens > MAX_EMBEDDED_TOKENS:
                raise _too_many_tokens()
            for text in found:
                _check_input(text, facts)
            texts += found
        return texts


def _without_panic(work: Callable[[], T]) -> T:
    with panics_refused():
        return work()


def _encoded(tokenizer: Any, piece: Sequence[str | list[int]]) -> list[list[int]]:
    return [x if isinstance(x, list) else list(tokenizer.encode(x)) for x in piece]


def check_size(asked: EmbeddingsRequest, max_token_chars: int, max_context: int) -> None:
    """Refuse what cannot fit, before anything is tokenized. Raises ``InvalidRequest``."""
    least = [len(x) if isinstance(x, list) else len(x) // max_token_chars for x in asked.inputs]
    if sum(least) > MAX_EMBEDDED_TOKENS:
        raise _too_many_tokens()
    if max(least) >= max_context:
        raise context_too_long(max_context, max(least), "input", at_least=True)


def pieces(inputs: Sequence[str | list[int]]) -> Iterator[list[str | list[int]]]:
    """Cut a list of inputs into pieces of about ``PIECE_CHARS``; no input is cut."""
    piece: list[str | list[int]] = []
    size = 0
    for one in inputs:
        if piece and size + len(one) > PIECE_CHARS:
            yield piece
            piece, size = [], 0
        piece.append(one)
        size += len(one)
    yield piece


def _check_input(text: Sequence[int], facts: ModelFacts) -> None:
    if not text:  # some texts are none to some tokenizers
        raise InvalidRequest("input: a text has no tokens", "input")
    if len(text) >= facts.max_context:
        raise context_too_long(facts.max_context, len(text), "input")
    if max(text) >= facts.vocab_size:
        raise InvalidRequest("input: a token id is none of this model's", "input")


def _too_many_tokens() -> InvalidRequest:
    return InvalidRequest(f"input: more than {MAX_EMBEDDED_TOKENS} tokens in all", "input")


class GeneratedOnly:
    """Hides the prompt from a processor, which then sees the answer's tokens only."""

    def __init__(self, processor: LogitsProcessor, prompt_tokens: int) -> None:
        self._processor = processor
        self._prompt_tokens = prompt_tokens

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        answer: mx.array = self._processor(tokens[self._prompt_tokens :], logits)
        return answer


class LogitBias:
    """Adds to chosen logits. The arrays are made in the first call, on the owner thread."""

    def __init__(self, bias: dict[int, float]) -> None:
        self._bias = bias
        self._processor: LogitsProcessor | None = None

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if self._processor is None:
            [self._processor] = make_logits_processors(logit_bias=self._bias)
        answer: mx.array = self._processor(tokens, logits)
        return answer


def make_processors(body: Body, prompt_tokens: int) -> list[LogitsProcessor]:
    """Make the processors that a request asks for, in mlx_lm's order, perhaps none.

    The order is bias, repetition, presence, frequency.
    """
    processors: list[LogitsProcessor] = []
    if body.bias:
        processors.append(LogitBias(body.bias))
    if body.repetition_penalty not in (None, 1.0):
        processors.append(make_repetition_penalty(body.repetition_penalty, _ALL_TOKENS))
    if body.presence_penalty:
        presence = make_presence_penalty(body.presence_penalty, _ALL_TOKENS)
        processors.append(GeneratedOnly(presence, prompt_tokens))
    if body.frequency_penalty:
        frequency = make_frequency_penalty(body.frequency_penalty, _ALL_TOKENS)
        processors.append(GeneratedOnly(frequency, prompt_tokens))
    return processors


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
        self._check_bias(request)
        request = self._facts.usual_sampling.filled_in(request)
        tools = plan_tools(request, self._vocabulary, grammar)
        prompt = self._prompts.chat(request, tools, session.salt if session else None)
        plan = RequestPlan(request.num_choices)
        processors = self._grammars(plan, tools.grammar, prompt)
        limit = self._limit(request.answer_tokens, len(prompt.token_ids))
        plan.generations.append(
            Generation(
                prompt=prompt.token_ids,
                sampling=_sampling(request, len(prompt.token_ids), processors),
                max_tokens=max(limit, 1),
                stop_sequences=self._ends(request.ignore_eos and tools.grammar is None),
                session=session,
                boundaries=prompt.boundaries,
                top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            )
        )
        plan.outputs = [
            self._chat_output(request, tools, prompt, limit) for _ in range(plan.num_choices)
        ]
        return plan

    def text(self, request: CompletionRequest, session: SessionRef | None) -> RequestPlan:
        """Plan a text completion; a session is kept for a single prompt only.

        Raises ``InvalidRequest`` for a request that this model cannot serve.
        """
        self._check_bias(request)
        _check_text(request)
        request = self._facts.usual_sampling.filled_in(request)
        plan = RequestPlan(request.num_choices)
        only = session if len(request.prompts) == 1 else None
        wanted = _TEXT_TOKENS if request.max_tokens is None else request.max_tokens
        for prompt in request.prompts:
            ids = self._text_ids(prompt)
            limit = self._limit(wanted, len(ids))
            plan.generations.append(
                Generation(
                    prompt=ids,
                    sampling=_sampling(request, len(ids), [None] * plan.num_choices),
                    max_tokens=max(limit, 1),
                    stop_sequences=self._ends(request.ignore_eos),
                    session=only,
                    top_logprobs=request.logprobs,
                )
            )
            plan.outputs += [
                self._text_output(request, ids, limit) for _ in range(plan.num_choices)
            ]
        return plan

    def _chat_output(
        self, request: ChatRequest, tools: ToolPlan, prompt: ChatPrompt, limit: int
    ) -> OutputProcessor:
        return OutputProcessor(
            AnswerText(
                self._vocabulary, prompt.token_ids, request.ignore_eos and tools.grammar is None
            ),
            chat_sections(self._vocabulary, tools.marked, prompt.thinking),
            request.stops,
            calls=tools.reader(),
            one_call=tools.marked and request.parallel_tool_calls is False,
            silent=limit == 0,
            keeps_scores=bool(request.logprobs),
        )

    def _text_output(
        self, request: CompletionRequest, ids: np.ndarray, limit: int
    ) -> OutputProcessor:
        return OutputProcessor(
            AnswerText(self._vocabulary, ids, request.ignore_eos),
            plain_sections(),
            request.stops,
            silent=limit == 0,
            keeps_scores=request.logprobs is not None,
        )

    def _text_ids(self, prompt: str | list[int]) -> np.ndarray:
        if isinstance(prompt, str):
            return self._prompts.text(prompt)
        return self._prompts.checked(prompt, "prompt")

    def _grammars(
        self, plan: RequestPlan, grammar: Grammar | None, prompt: ChatPrompt
    ) -> list[GrammarProcessor | None]:
        if grammar is None:
            return [None] * plan.num_choices
        after = tuple(self._vocabulary.tokenizer.think_end_tokens) if prompt.thinking else None
        num = len(prompt.token_ids)
        plan.grammars = [grammar.processor(num, after) for _ in range(plan.num_choices)]
        return list(plan.grammars)

    def _limit(self, wanted: int | None, prompt_tokens: int) -> int:
        """The length of an answer in tokens: what was asked for, as far as the context has room."""
        room = self._facts.max_context - prompt_tokens
        return room if wanted is None else min(wanted, room)

    def _ends(self, ignored: bool) -> list[tuple[int, ...]]:
        return [] if ignored else [(token,) for token in sorted(self._vocabulary.eos)]

    def _check_bias(self, body: Body) -> None:
        _check_body(body)
        if max(body.bias, default=0) >= self._vocabulary.size:
            raise InvalidRequest(
                f"logit_bias: a token id is outside the vocabulary of {self._vocabulary.size}.",
                "logit_bias",
            )


def _check_body(body: Body) -> None:
    """Refuse what only vLLM can do. Raises ``InvalidRequest``."""
    if body.min_tokens:
        raise InvalidRequest("min_tokens: this engine cannot do that: leave it out", "min_tokens")


def _check_text(request: CompletionRequest) -> None:
    if request.echo and request.logprobs is not None:
        message = "echo: the prompt has no logprobs here: drop echo or logprobs"
        raise InvalidRequest(message, "echo")
    if request.response_format is not None and request.response_format.type != "text":
        message = "response_format: a text completion has none here: send a chat"
        raise InvalidRequest(message, "response_format")
    if request.structured_outputs:
        message = "structured_outputs: a text completion has none here: send a chat"
        raise InvalidRequest(message, "structured_outputs")


def _sampling(
    body: Body, prompt_tokens: int, grammars: Sequence[GrammarProcessor | None]
) -> list[SequenceSampling]:
    params = SamplingParams.of(body)
    seed = fresh_seed() if body.seed is None else body.seed
    chosen = []
    for i, grammar in enumerate(grammars):
        processors = make_processors(body, prompt_tokens)
        if grammar is not None:
            processors.append(grammar)
        chosen.append(SequenceSampling(make_sampler(params, seed, i), processors))
    return chosen
