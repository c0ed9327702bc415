"""Turns one answer's tokens into text, reasoning and tool calls.

tokens -> text (never half a character) -> stop strings -> reasoning, tool and answer sections
(mlx_lm's text machine) -> tool calls. Each stage may hold text back; ``finish`` releases it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.tokenizer_utils import TokenizerWrapper

from engines.mlx_worker.answer.tool_calls import CallDelta, CallReader, ParsedText
from engines.mlx_worker.generation import FinishReason, Token
from engines.mlx_worker.model.loading import Vocabulary

# JSON has no -inf; OpenAI writes this log-probability for a token that cannot occur.
_NEVER = -9999.0
_TextMachine: Any = TextStateMachine  # mlx_lm has no annotations
_make_text_machine: Any = make_text_state_machine
# OpenAI's finish reasons; a cancelled answer gets none, unless a stop string cancelled it.
ShownReason: TypeAlias = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class ScoredToken:
    """One token of an answer, with the likeliest tokens at its position."""

    token: Token
    offset: int  # characters of the answer before the token


def chat_logprobs(scores: Sequence[ScoredToken], vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the ``logprobs`` of a chat choice."""

    def spelled(token: int, logprob: float | None) -> dict[str, Any]:
        text, spelling = _text(token, vocabulary), vocabulary.spelling(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(spelling)}

    entries = []
    for token in (x.token for x in scores):
        top = [spelled(x, logprob) for x, logprob in token.top]
        entries.append({**spelled(token.id, token.logprob), "top_logprobs": top})
    return {"content": entries, "refusal": None}


def text_logprobs(scores: Sequence[ScoredToken], vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the ``logprobs`` of a text completion; offsets count from the answer's start."""
    return {
        "tokens": [_text(x.token.id, vocabulary) for x in scores],
        "token_logprobs": [_finite(x.token.logprob) for x in scores],
        # The likeliest tokens, and the chosen one even if it is not among them.
        "top_logprobs": [
            {
                _text(token, vocabulary): _finite(logprob)
                for token, logprob in (*x.token.top, (x.token.id, x.token.logprob))
            }
            for x in scores
        ],
        "text_offset": [x.offset for x in scores],
    }


def _text(token: int, vocabulary: Vocabulary) -> str:
    return vocabulary.spelling(token).decode("utf-8", "replace")


def _finite(logprob: float | None) -> float:
    return _NEVER if logprob is None else max(logprob, _NEVER)


class StopStrings:
    """Passes text on up to the first stop string.

    Text that may be the beginning of a stop string is held back until more text decides it.
    Positions count characters from the start of the answer.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(x) for x in stops), default=0)
        self._held = ""
        self.num_passed = 0  # characters passed on so far
        self.found: str | None = None

    @property
    def hit(self) -> bool:
        """True once a stop string was found."""
        return self.found is not None

    def feed(self, text: str) -> str:
        """Take more text; return the text that is now safe to show, "" after a stop string."""
        if self.hit:
            return ""
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        cut, self.found = min(found) if found else (len(text) - self._num_undecided(text), None)
        shown, self._held = text[:cut], text[cut:]
        self.num_passed += len(shown)
        return shown

    def flush(self) -> str:
        """Return the text held back at the answer's end, which began no stop string after all."""
        shown = "" if self.hit else self._held
        self.num_passed += len(shown)
        return shown

    def _num_undecided(self, text: str) -> int:
        """Return the length of the longest end of ``text`` that is a stop string's beginning."""
        for size in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0


@dataclass(frozen=True)
class Delta:
    """The part of an answer that one token added: reasoning, content, calls, in this order."""

    reasoning: str = ""
    content: str = ""
    calls: Sequence[CallDelta] = ()
    scores: Sequence[ScoredToken] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls or self.scores)


class _WithoutTools:
    """A tokenizer for ``make_text_state_machine`` that hides its markers of tool calls."""

    has_tool_calling = False

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class Sections:
    """Splits an answer's text into reasoning, tool calls and plain text.

    Markers are dropped; text that may begin one is held back until more text decides it.
    """

    def __init__(self, machine: Any, first: str) -> None:
        self._machine = machine.make_state(first)

    @property
    def current(self) -> str:
        """The name of the section that the next text belongs to, unless a marker begins it."""
        return str(self._machine[0])

    def feed(self, text: str) -> list[tuple[str, str]]:
        """Split more text; return pairs of (section, text) in order."""
        self._machine, sections = _TextMachine.split(self._machine, text)
        return list(sections)

    def flush(self) -> list[tuple[str, str]]:
        """Return the text held back at the answer's end, since no marker follows."""
        self._machine, text, section = _TextMachine.flush(self._machine)
        return [(section, text)]


def chat_sections(vocabulary: Vocabulary, marked_tools: bool, thinking: bool) -> Sections:
    """Return the splitter of a chat answer.

    Args:
        marked_tools: tool calls are written between the model's own markers.
        thinking: the prompt has opened a block of reasoning.
    """
    tokenizer = vocabulary.tokenizer
    machine = _make_text_machine(tokenizer if marked_tools else _WithoutTools(tokenizer))
    first = "reasoning" if thinking else "normal"
    return Sections(machine, tokenizer.response_initial_state or first)


def plain_sections() -> Sections:
    """Return the splitter of a text completion, which has a single section."""
    return Sections(_TextMachine(), "normal")


class AnswerText:
    """Detokenizes an answer, token by token, never to half a character."""

    def __init__(
        self, vocabulary: Vocabulary, prompt: Sequence[int] | np.ndarray, shows_eos: bool = False
    ) -> None:
        """``shows_eos``: end-of-text tokens do not end the answer, so they are part of its text."""
        self._vocabulary = vocabulary
        self._shows_eos = shows_eos
        self._detokenizer, self._owed = vocabulary.continuing(prompt)
        self.num_chars = 0  # characters of the answer so far

    def hides(self, token: int, in_call: bool) -> bool:
        """Return whether a token is not text: the end, padding, special tokens outside calls."""
        ends = token in self._vocabulary.eos and not self._shows_eos
        return ends or self._vocabulary.hides(token, in_call)

    def add(self, token: int) -> str:
        """Take one more token; return the new text that is complete by now."""
        self._detokenizer.add_token(token)
        return self._new_text()

    def finish(self) -> str:
        """Return the text that was held back as half a character."""
        # mlx_lm's byte decoder raises at half a character in front of an added token.
        with contextlib.suppress(KeyError):
            self._detokenizer.finalize()
        return self._new_text()

    def _new_text(self) -> str:
        text: str = self._detokenizer.last_segment
        shown = text[self._owed :]
        self._owed -= len(text) - len(shown)
        self.num_chars += len(shown)
        return shown


class NoCalls:
    """A ``CallReader`` for requests that offer no tools: all text is content."""

    num_calls = 0
    is_cut = False

    def feed(self, section: str, text: str) -> ParsedText:
        return ParsedText(text)

    def finish(self) -> ParsedText:
        return ParsedText()


class OutputProcessor:
    """The state of one answer. ``stopped`` asks for its sequence to be ended now."""

    def __init__(
        self,
        text: AnswerText,
        sections: Sections,
        stops: Sequence[str],
        *,
        calls: CallReader | None = None,
        one_call: bool = False,
        silent: bool = False,
        keeps_scores: bool = False,
    ) -> None:
        """
        Args:
            stops: the request's stop strings.
            calls: finds the tool calls in the text; None = the request offers no tools.
            one_call: end the answer after its first tool call.
            silent: show no text, since the request asks for no tokens.
            keeps_scores: show the tokens' log-probabilities.
        """
        self._text = text
        self._sections = sections
        self._stops = StopStrings(stops)
        self._calls = calls or NoCalls()
        self._one_call = one_call
        self._silent = silent
        self._keeps_scores = keeps_scores
        self._scores: list[ScoredToken] = []  # of tokens whose text is held back
        self._after_reasoning = False
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.stopped = silent

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return self._stops.found

    def take(self, token: Token) -> Delta:
        """Take one more token; return the text to show. Tokens after a stop are ignored."""
        if self.stopped:
            return Delta()
        self.num_tokens += 1
        self.num_reasoning_tokens += self._sections.current == "reasoning"
        if self._text.hides(token.id, self._sections.current == "tool"):
            return Delta()
        if self._keeps_scores:
            self._scores.append(ScoredToken(token, self._text.num_chars))
        return self._advance(self._text.add(token.id))

    def finish(self, reason: FinishReason) -> tuple[Delta, ShownReason]:
        """Return the text held back at the answer's end, and the reason to show for the end."""
        if self._silent:
            return Delta(), "length"
        rest = [] if self._stops.hit else self._ending()
        rest.append(self._shown(self._calls.finish()))
        # An answer that was stopped here may have reached its length limit as well.
        if reason == "length" and not self.stopped:
            return joined(rest), "length"
        is_cut_by_stop = self._stops.hit and self._calls.is_cut
        has_calls = self._calls.num_calls > 0 and not is_cut_by_stop
        return joined(rest), "tool_calls" if has_calls else "stop"

    def _ending(self) -> list[Delta]:
        ended = [self._advance(self._text.finish())]
        if not self._stops.hit:
            ended.append(self._advance(self._stops.flush(), checked=True))
            ended.append(self._read(self._sections.flush(), self._scores))
        return ended

    def _advance(self, text: str, checked: bool = False) -> Delta:
        """Pass text through the stop strings, unless ``checked``, and on to the sections."""
        safe = text if checked else self._stops.feed(text)
        self.stopped = self.stopped or self._stops.hit
        sections = self._sections.feed(safe)
        if self._stops.hit:
            sections += self._sections.flush()
        return self._read(sections, self._release_scores())

    def _read(self, sections: Sequence[tuple[str, str]], scores: Sequence[ScoredToken]) -> Delta:
        deltas = [self._read_one(section, text) for section, text in sections]
        if self._one_call and self._calls.num_calls:
            self.stopped = True
        return joined([*deltas, Delta(scores=scores)])

    def _read_one(self, section: str, text: str) -> Delta:
        if section == "reasoning":
            self._after_reasoning = True
            return Delta(reasoning=text)
        if section not in ("normal", "tool"):
            return Delta()  # a header between two messages, in formats with headers
        if section == "normal" and self._after_reasoning:
            # Line breaks after the reasoning come from the template's format, not the answer.
            text = text.lstrip("\n")
            self._after_reasoning = not text
        return self._shown(self._calls.feed(section, text))

    def _shown(self, parsed: ParsedText) -> Delta:
        calls = [x for x in parsed.calls if x.index == 0 or not self._one_call]
        return Delta(content=parsed.content, calls=calls)

    def _release_scores(self) -> list[ScoredToken]:
        """Remove and return the scores of tokens whose text was passed on.

        The tokens of a stop string are never passed on.
        """
        if not self._scores:
            return []
        passed = self._stops.num_passed
        released = [x for x in self._scores if x.offset < passed]
        self._scores = [x for x in self._scores if x.offset >= passed]
        return released


def joined(deltas: Sequence[Delta]) -> Delta:
    """Return the deltas of several tokens as one."""
    return Delta(
        "".join(x.reasoning for x in deltas),
        "".join(x.content for x in deltas),
        [call for x in deltas for call in x.calls],
        [score for x in deltas for score in x.scores],
    )
