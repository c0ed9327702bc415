"""One answer in the making: from the owner's tokens to what a client is shown.

tokens -> text (never half a character) -> stop strings -> reasoning, tool and answer sections
(mlx_lm's text machine) -> tool calls. Each stage may hold something back; ``finish`` lets it out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.tokenizer_utils import TokenizerWrapper

from engines.mlx_worker.calls import CallPart, CallReader, Found, NoCalls
from engines.mlx_worker.generation import FinishReason, Token
from engines.mlx_worker.scores import Score
from engines.mlx_worker.stops import StopText
from engines.mlx_worker.vocabulary import Vocabulary

_TextMachine: Any = TextStateMachine  # mlx_lm has no annotations
_make_text_machine: Any = make_text_state_machine

# OpenAI's; a cancelled row is reported by nobody, except when a stop string cancelled it.
ShownReason: TypeAlias = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class Delta:
    """What one token added; the three texts are shown in this order."""

    reasoning: str = ""
    content: str = ""
    calls: Sequence[CallPart] = ()
    scores: Sequence[Score] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls or self.scores)


@dataclass(frozen=True)
class Markers:
    """The view of a tokenizer that ``make_text_state_machine`` takes, tool calls optional."""

    has_tool_calling: bool
    has_thinking: bool
    think_start: str | None
    think_end: str | None
    tool_call_start: str | None
    tool_call_end: str | None
    structural_markers: tuple[str, ...]
    response_transitions: dict[str, Any]

    @classmethod
    def of(cls, tokenizer: TokenizerWrapper, tools: bool) -> Markers:
        return cls(
            has_tool_calling=tools and tokenizer.has_tool_calling,
            has_thinking=tokenizer.has_thinking,
            think_start=tokenizer.think_start,
            think_end=tokenizer.think_end,
            tool_call_start=tokenizer.tool_call_start,
            tool_call_end=tokenizer.tool_call_end,
            structural_markers=tuple(tokenizer.structural_markers),
            response_transitions=tokenizer.response_transitions,
        )


class Sections:
    """Where an answer is reasoning, where a tool call, and where plain text.

    Markers are dropped; a beginning of one is held back until it is decided.
    """

    def __init__(self, machine: Any, first: str) -> None:
        self._machine = machine.make_state(first)

    @property
    def current(self) -> str:
        return str(self._machine[0])

    def feed(self, text: str) -> list[tuple[str, str]]:
        self._machine, sections = _TextMachine.split(self._machine, text)
        return list(sections)

    def flush(self) -> list[tuple[str, str]]:
        self._machine, text, section = _TextMachine.flush(self._machine)
        return [(section, text)]


def chat_sections(vocabulary: Vocabulary, marked_tools: bool, thinking: bool) -> Sections:
    tokenizer = vocabulary.tokenizer
    machine = _make_text_machine(Markers.of(tokenizer, marked_tools))
    first = "reasoning" if thinking else "normal"
    return Sections(machine, tokenizer.response_initial_state or first)


def plain_sections() -> Sections:
    """A text completion has no sections."""
    return Sections(_TextMachine(), "normal")


class Answer:
    """The state of one row. ``stopped`` asks for the row to be ended now."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt: list[int],
        sections: Sections,
        stops: Sequence[str],
        *,
        calls: CallReader | None = None,
        one_call: bool = False,
        silent: bool = False,
        shows_eos: bool = False,
        keeps_scores: bool = False,
    ) -> None:
        """
        Args:
            one_call: end the answer once it has made a tool call.
            silent: nothing is to be shown; the prompt was all.
        """
        self._vocabulary = vocabulary
        self._sections = sections
        self._stops = StopText(stops)
        self._calls = calls or NoCalls()
        self._one_call = one_call
        self._silent = silent
        self._shows_eos = shows_eos
        self._keeps_scores = keeps_scores
        self._detokenizer, self._owed = vocabulary.continuing(prompt)
        self._scores: list[Score] = []  # of tokens whose text is held back
        self._num_chars = 0
        self._after_reasoning = False
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.stopped = silent

    def take(self, token: Token) -> Delta:
        """What to show after one more token; tokens that come after a stop are ignored."""
        if self.stopped:
            return Delta()
        self.num_tokens += 1
        self.num_reasoning_tokens += self._sections.current == "reasoning"
        ends = token.id in self._vocabulary.eos and not self._shows_eos
        if ends or self._vocabulary.hides(token.id, self._sections.current == "tool"):
            return Delta()
        if self._keeps_scores:
            self._scores.append(Score(token, self._num_chars))
        self._detokenizer.add_token(token.id)
        return self._advance(self._new_text())

    def finish(self, reason: FinishReason) -> tuple[Delta, ShownReason]:
        """The rest, and why it ended."""
        if self._silent:
            return Delta(), "length"
        rest = [] if self._stops.hit else self._ending()
        rest.append(self._shown(self._calls.finish()))
        if reason != "length" and self._calls.num_calls:
            return _joined(rest), "tool_calls"
        return _joined(rest), "length" if reason == "length" else "stop"

    def _ending(self) -> list[Delta]:
        self._finalize()
        ended = [self._advance(self._new_text())]
        if not self._stops.hit:
            ended.append(self._advance(self._stops.flush(), checked=True))
            ended.append(self._read(self._sections.flush(), self._scores))
        return ended

    def _finalize(self) -> None:
        # mlx_lm's byte decoder trips over half a character in front of an added token.
        with contextlib.suppress(KeyError):
            self._detokenizer.finalize()

    def _new_text(self) -> str:
        text = self._detokenizer.last_segment
        shown = text[self._owed :]
        self._owed -= len(text) - len(shown)
        self._num_chars += len(shown)
        return shown

    def _advance(self, text: str, checked: bool = False) -> Delta:
        """Text through stop strings (unless it has been) and on to the sections."""
        safe = text if checked else self._stops.feed(text)
        self.stopped = self.stopped or self._stops.hit
        sections = self._sections.feed(safe)
        if self._stops.hit:
            sections += self._sections.flush()
        return self._read(sections, self._release_scores())

    def _read(self, sections: Sequence[tuple[str, str]], scores: Sequence[Score]) -> Delta:
        deltas = [self._read_one(section, text) for section, text in sections]
        if self._one_call and self._calls.num_calls:
            self.stopped = True
        return _joined([*deltas, Delta(scores=scores)])

    def _read_one(self, section: str, text: str) -> Delta:
        if section == "reasoning":
            self._after_reasoning = True
            return Delta(reasoning=text)
        if section not in ("normal", "tool"):
            return Delta()  # a header between two messages, in formats that have one
        if section == "normal" and self._after_reasoning:
            # Templates put line breaks behind the reasoning; they are no part of the answer.
            text = text.lstrip("\n")
            self._after_reasoning = not text
        return self._shown(self._calls.feed(section, text))

    def _shown(self, found: Found) -> Delta:
        parts = [x for x in found.parts if x.index == 0 or not self._one_call]
        return Delta(content=found.content, calls=parts)

    def _release_scores(self) -> list[Score]:
        """Those of tokens whose text has been let through; behind a stop string there are none."""
        if not self._scores:
            return []
        passed = self._stops.num_passed
        released = [x for x in self._scores if x.offset < passed]
        self._scores = [x for x in self._scores if x.offset >= passed]
        return released


def _joined(deltas: Sequence[Delta]) -> Delta:
    return Delta(
        "".join(x.reasoning for x in deltas),
        "".join(x.content for x in deltas),
        [part for x in deltas for part in x.calls],
        [score for x in deltas for score in x.scores],
    )
