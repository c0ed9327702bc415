"""From a checked request to what the owner thread is asked for, and to who reads its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engines.mlx_worker.answer import Answer, chat_sections, plain_sections
from engines.mlx_worker.chat import ChatPrompt, PromptWriter
from engines.mlx_worker.generation import Generation, ModelFacts, Row
from engines.mlx_worker.grammar import Grammar, GrammarProcessor
from engines.mlx_worker.penalties import row_processors
from engines.mlx_worker.sampling import Sampling, fresh_seed, row_sampler
from engines.mlx_worker.tools import ToolPlan, plan_tools
from engines.mlx_worker.vocabulary import Vocabulary
from engines.openai import Body, ChatRequest, CompletionRequest, InvalidRequest
from kvstore.records import SessionRef

# OpenAI's default length of a text completion.
_TEXT_TOKENS = 16


@dataclass
class Job:
    """One HTTP request: a generation per prompt, and an answer per choice.

    Choice ``i`` is row ``i % n`` of generation ``i // n``.
    """

    num_rows: int
    generations: list[Generation] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    grammars: list[GrammarProcessor] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(generation.prompt) for generation in self.generations)


class JobWriter:
    """Writes jobs for one model. Slow (templates, tokenizers, grammars): not for the event loop.

    Not thread-safe: one call at a time.
    """

    def __init__(self, vocabulary: Vocabulary, facts: ModelFacts) -> None:
        self._vocabulary = vocabulary
        self._facts = facts
        self._prompts = PromptWriter(vocabulary, facts.max_context)

    def chat(self, request: ChatRequest, session: SessionRef | None) -> Job:
        """Raises ``InvalidRequest``."""
        self._check_bias(request)
        plan = plan_tools(request, self._vocabulary)
        prompt = self._prompts.chat(request, plan)
        job = Job(request.num_choices)
        processors = self._grammars(job, plan.grammar, prompt)
        limit = self._limit(request.answer_tokens, len(prompt.token_ids))
        job.generations.append(
            Generation(
                prompt=prompt.token_ids,
                rows=_rows(request, len(prompt.token_ids), processors),
                max_tokens=max(limit, 1),
                stop_sequences=self._ends(request.ignore_eos and plan.grammar is None),
                session=session,
                boundaries=prompt.boundaries,
                top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            )
        )
        job.answers = [self._chat_answer(request, plan, prompt, limit) for _ in range(job.num_rows)]
        return job

    def text(self, request: CompletionRequest, session: SessionRef | None) -> Job:
        """Raises ``InvalidRequest``. A session is kept for a single prompt only."""
        self._check_bias(request)
        job = Job(request.num_choices)
        only = session if len(request.prompts) == 1 else None
        wanted = _TEXT_TOKENS if request.max_tokens is None else request.max_tokens
        for prompt in request.prompts:
            ids = self._text_ids(prompt)
            limit = self._limit(wanted, len(ids))
            job.generations.append(
                Generation(
                    prompt=ids,
                    rows=_rows(request, len(ids), [None] * job.num_rows),
                    max_tokens=max(limit, 1),
                    stop_sequences=self._ends(request.ignore_eos),
                    session=only,
                    top_logprobs=request.logprobs,
                )
            )
            job.answers += [self._text_answer(request, ids, limit) for _ in range(job.num_rows)]
        return job

    def _chat_answer(
        self, request: ChatRequest, plan: ToolPlan, prompt: ChatPrompt, limit: int
    ) -> Answer:
        return Answer(
            self._vocabulary,
            prompt.token_ids,
            chat_sections(self._vocabulary, plan.marked, prompt.thinking),
            request.stops,
            calls=plan.reader(),
            one_call=plan.marked and request.parallel_tool_calls is False,
            silent=limit == 0,
            shows_eos=request.ignore_eos and plan.grammar is None,
            keeps_scores=bool(request.logprobs),
        )

    def _text_answer(self, request: CompletionRequest, ids: list[int], limit: int) -> Answer:
        return Answer(
            self._vocabulary,
            ids,
            plain_sections(),
            request.stops,
            silent=limit == 0,
            shows_eos=request.ignore_eos,
            keeps_scores=request.logprobs is not None,
        )

    def _text_ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return self._prompts.text(prompt)
        return self._prompts.checked(prompt, "prompt")

    def _grammars(
        self, job: Job, grammar: Grammar | None, prompt: ChatPrompt
    ) -> list[GrammarProcessor | None]:
        if grammar is None:
            return [None] * job.num_rows
        after = tuple(self._vocabulary.tokenizer.think_end_tokens) if prompt.thinking else None
        num = len(prompt.token_ids)
        job.grammars = [grammar.processor(num, after) for _ in range(job.num_rows)]
        return list(job.grammars)

    def _limit(self, wanted: int | None, prompt_tokens: int) -> int:
        """Tokens of an answer: what was asked for, as far as the context has room for it."""
        room = self._facts.max_context - prompt_tokens
        return room if wanted is None else min(wanted, room)

    def _ends(self, ignored: bool) -> list[tuple[int, ...]]:
        return [] if ignored else [(token,) for token in sorted(self._vocabulary.eos)]

    def _check_bias(self, body: Body) -> None:
        if max(body.bias, default=0) >= self._vocabulary.size:
            raise InvalidRequest(
                f"logit_bias: a token id is outside the vocabulary of {self._vocabulary.size}.",
                "logit_bias",
            )


def _rows(body: Body, prompt_tokens: int, grammars: Sequence[GrammarProcessor | None]) -> list[Row]:
    sampling = Sampling.of(body)
    seed = fresh_seed() if body.seed is None else body.seed
    rows = []
    for i, grammar in enumerate(grammars):
        processors = row_processors(body, prompt_tokens)
        if grammar is not None:
            processors.append(grammar)
        rows.append(Row(row_sampler(sampling, seed, i), processors))
    return rows
