from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer, TokenizerWrapper

from engines.mlx_worker.answer.output_processor import (
    AnswerText,
    Delta,
    OutputProcessor,
    StopStrings,
    chat_sections,
    plain_sections,
)
from engines.mlx_worker.answer.tool_calls import LineCalls
from engines.mlx_worker.generation import FinishReason, ModelFacts, Token
from engines.mlx_worker.model.loading import Vocabulary
from engines.mlx_worker.prompt.request_planner import RequestPlanner
from engines.openai.requests import validate_chat

pytestmark = pytest.mark.mlx

END = 2
TOOL = {"type": "function", "function": {"name": "look"}}


def encoded(vocabulary: Vocabulary, text: str) -> list[int]:
    return list(vocabulary.tokenizer.encode(text, add_special_tokens=False))


def answer(vocabulary: Vocabulary, stops: Sequence[str] = (), **options: Any) -> OutputProcessor:
    prompt = encoded(vocabulary, "Hello,")
    sections = chat_sections(vocabulary, False, options.pop("thinking", False))
    text = AnswerText(vocabulary, prompt, options.pop("shows_eos", False))
    return OutputProcessor(text, sections, stops, **options)


def chat_answer(vocabulary: Vocabulary, **fields: Any) -> OutputProcessor:
    facts = ModelFacts("m", 500, vocabulary.size, True, False)
    messages = [{"role": "user", "content": "x"}]
    request = validate_chat({"model": "m", "messages": messages, **fields})
    return RequestPlanner(vocabulary, facts).chat(request, None).outputs[0]


def read(
    answer: OutputProcessor, tokens: Sequence[int], reason: FinishReason = "stop"
) -> tuple[Delta, str]:
    deltas = [answer.take(Token(0, x, -0.5)) for x in tokens]
    last, shown = answer.finish("cancelled" if answer.stopped else reason)
    deltas.append(last)
    whole = Delta(
        "".join(x.reasoning for x in deltas),
        "".join(x.content for x in deltas),
        [part for x in deltas for part in x.calls],
        [score for x in deltas for score in x.scores],
    )
    return whole, shown


@pytest.mark.parametrize("text", [" naïve ☃ 🧊!", "two\n\nlines", " ", "  x", "\n", ""])
def test_text_comes_back_exactly(plain: Vocabulary, text: str) -> None:
    tokens = [*encoded(plain, text), END]
    whole, reason = read(answer(plain), tokens)
    assert (whole.content, reason) == (text, "stop")
    prompt = encoded(plain, "a ")
    text_answer = OutputProcessor(AnswerText(plain, prompt), plain_sections(), [])
    assert read(text_answer, tokens)[0].content == text
    slow = TokenizerWrapper(plain.tokenizer._tokenizer, NaiveStreamingDetokenizer)
    if text != " ":  # that one drops a lone blank
        assert read(answer(Vocabulary(slow, plain.size)), tokens)[0].content == text


def test_no_half_characters(plain: Vocabulary) -> None:
    reader = answer(plain)
    shown = [reader.take(Token(0, x)).content for x in encoded(plain, "☃🧊")]
    assert [x for x in shown if x] == ["☃", "🧊"]


def test_cut_in_the_middle_of_a_character(plain: Vocabulary) -> None:
    tokens = encoded(plain, "ok🧊")[:-1]
    whole, reason = read(answer(plain), tokens, "length")
    assert whole.content.rstrip("\ufffd") == "ok"
    assert reason == "length"


def test_special_and_padding_tokens_are_no_text(plain: Vocabulary) -> None:
    tokens = [1, *encoded(plain, "a"), 0, 405, *encoded(plain, "b"), END]
    reader = answer(plain)
    assert read(reader, tokens)[0].content == "ab"
    assert reader.num_tokens == len(tokens)


def test_end_can_be_ignored(plain: Vocabulary) -> None:
    reader = answer(plain, shows_eos=True)
    whole, reason = read(reader, [*encoded(plain, "a"), END, *encoded(plain, "b")], "length")
    assert (whole.content, reason) == ("ab", "length")


def test_stop_string_over_tokens(plain: Vocabulary) -> None:
    reader = answer(plain, ["ris, a", "zzz"], keeps_scores=True)
    tokens = encoded(plain, "It is Paris, and more")
    whole, reason = read(reader, tokens)
    assert (whole.content, reason) == ("It is Pa", "stop")
    assert reader.stopped
    assert reader.num_tokens < len(tokens)
    spelled = b"".join(plain.spelling(x.token.id) for x in whole.scores)
    assert spelled.decode().startswith("It is Pa")
    assert not spelled.decode().startswith("It is Paris, a")


def test_stop_string_in_the_last_half_character(plain: Vocabulary) -> None:
    tokens = encoded(plain, "ok🧊")[:-1]
    whole, reason = read(answer(plain, ["\ufffd"]), tokens, "length")
    assert (whole.content, reason) == ("ok", "stop")


@pytest.mark.parametrize("after", ["", ", and"])  # what came before the answer was ended
def test_stop_string_that_is_whole_at_the_limit(plain: Vocabulary, after: str) -> None:
    reader = answer(plain, ["ris"])
    for token in [*encoded(plain, "It is Paris"), *encoded(plain, after)]:
        reader.take(Token(0, token))
    assert (reader.finish("length")[1], reader.stop) == ("stop", "ris")


def test_beginning_of_a_stop_string_at_the_limit(plain: Vocabulary) -> None:
    reader = answer(plain, ["rise"])
    whole, reason = read(reader, encoded(plain, "It is Paris"), "length")
    assert (whole.content, reason, reader.stop) == ("It is Paris", "length", None)


def test_scores_cover_the_answer(plain: Vocabulary) -> None:
    text = "It is Paris, naïve ☃"
    whole, _ = read(answer(plain, ["zz"], keeps_scores=True), [*encoded(plain, text), END])
    assert b"".join(plain.spelling(x.token.id) for x in whole.scores).decode() == text
    offsets = [x.offset for x in whole.scores]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0


def test_reasoning_that_the_model_opens_itself(thinking: Vocabulary) -> None:
    tokens = encoded(thinking, "<think>hm</think>four")
    whole, _ = read(answer(thinking), [*tokens, END])
    assert (whole.reasoning, whole.content) == ("hm", "four")


def test_reasoning_without_an_end(thinking: Vocabulary) -> None:
    whole, reason = read(answer(thinking, thinking=True), encoded(thinking, "hm </thi"), "length")
    assert (whole.reasoning, whole.content, reason) == ("hm </thi", "", "length")


CALL = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'

TWO_CALLS = CALL.replace("{", "[{", 1).replace("</", ', {"name": "look"}]</')


def test_calls_are_text_where_none_were_offered(with_tools: Vocabulary) -> None:
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        whole, reason = read(chat_answer(with_tools, **fields), encoded(with_tools, CALL))
        assert (whole.content, reason, whole.calls) == (CALL, "stop", [])


def test_one_call_that_is_whole_at_the_limit(with_tools: Vocabulary) -> None:
    reader = chat_answer(with_tools, tools=[TOOL], parallel_tool_calls=False)
    for token in encoded(with_tools, f"{CALL} "):
        reader.take(Token(0, token))
    assert reader.stopped
    assert reader.finish("length")[1] == "tool_calls"


@pytest.mark.parametrize("text", [CALL + CALL + "more", TWO_CALLS + "more"])
def test_one_call_only(with_tools: Vocabulary, text: str) -> None:
    reader = chat_answer(with_tools, tools=[TOOL], parallel_tool_calls=False)
    whole, reason = read(reader, encoded(with_tools, text))
    assert reader.stopped
    assert (whole.content, reason) == ("", "tool_calls")
    assert {x.index for x in whole.calls} == {0}


@pytest.mark.parametrize(("stop", "wanted"), [("}", "stop"), ("\n", "tool_calls")])
def test_a_stop_string_inside_a_forced_call_is_a_stop(plain, stop, wanted):
    """Its arguments are cut, and a client would run what is no call."""
    text = '{"name": "look", "arguments": {"at": 1}}\n'
    reader = answer(plain, [stop], calls=LineCalls(["look"]))
    whole, reason = read(reader, encoded(plain, text))
    assert (reason, reader.stop) == (wanted, stop)
    assert whole.calls[0].name == "look"


def test_beginning_of_a_stop_string_is_held_back_until_decided() -> None:
    reader = StopStrings(["\n\nUser:"])
    assert reader.feed("hello\n") == "hello"
    assert reader.feed("\nUse") == ""
    assert reader.feed("less") == "\n\nUseless"
    assert not reader.hit


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.text("abc", max_size=4), max_size=8),
)
def test_same_as_searching_the_whole_text(stops: list[str], pieces: list[str]) -> None:
    whole = "".join(pieces)
    # The reader sees the end of a stop string first.
    ends = [(whole.find(x) + len(x), whole.find(x)) for x in stops if x in whole]
    reader = StopStrings(stops)
    text = "".join(map(reader.feed, whole)) + reader.flush()
    assert reader.hit == bool(ends)
    assert text == (whole[: min(at for end, at in ends if end == min(ends)[0])] if ends else whole)
