"""Prompts encoded by segments have the ids of the whole, with every kind of tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from engines.host.segment_cache import ENTRY_BYTES, Cuts, SegmentCache, holds, safe_cuts
from tests.unit.engines.host.kinds_of_tokenizers import (
    CONTROLS,
    KINDS,
    controls,
    kind,
    with_tokens,
)

KEY = b"tenant"
QUICK = settings(suppress_health_check=list(HealthCheck))
_PIECES = (
    *CONTROLS, *(x[:-1] for x in CONTROLS), *(x[1:] for x in CONTROLS), "<unk>", "[SEP]", "[CLS]",
    " ", "  ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\u200b", "▁", "Ġ",
    "a", "b", "the", "Hello", "'s", "it's", "12", "1234567", ".", "...", "<", ">", "|", "[", "]",
    "e\u0301", "\u0301", "é", "É", "ﬁ", "½", "①", "İ", "ß", "＜ｓ＞", "<|im_", "end|>",
    "\U0001f600", "\U0001f3fd", "\u200d", "\U0001f468\u200d\U0001f469", "東京", "дом", "\u0000",
)  # fmt: skip
TEXTS = st.lists(
    st.one_of(st.sampled_from(CONTROLS), st.sampled_from(_PIECES), st.text(max_size=4)), max_size=14
).map("".join)
FLAGS = st.fixed_dictionaries(
    {x: st.booleans() for x in ("special", "normalized", "lstrip", "rstrip", "single_word")}
)


def whole(backend: Tokenizer, text: str) -> list[int]:
    try:
        return list(backend.encode(text, add_special_tokens=False).ids)
    except BaseException as error:
        # Tokens with a blank at their edge beside one that takes blanks make the library panic.
        assume(type(error).__name__ != "PanicException")
        raise


def cache_of(backend: Tokenizer) -> SegmentCache:
    return SegmentCache(backend, lambda text: whole(backend, text), min_chars=1)


def agrees(backend: Tokenizer, texts: list[str]) -> None:
    """New, and known from before, each text has the ids of the whole."""
    cache = cache_of(backend)
    for text in texts:
        expected = whole(backend, text)
        for _ in range(2):
            assert cache.encode(text, KEY) == expected, cache.cuts


@pytest.mark.parametrize("name", KINDS)
def test_usual_control_tokens_are_cuts(name: str):
    backends = [with_tokens(kind(name), controls(rstrip=x)) for x in (False, True)]
    for backend in backends:
        assert set(CONTROLS) <= set(cache_of(backend).cuts.tokens)

    @QUICK
    @given(st.sampled_from(backends), st.lists(TEXTS, min_size=1, max_size=3))
    def equal(backend: Tokenizer, texts: list[str]) -> None:
        agrees(backend, ["".join(texts[:x]) for x in range(1, len(texts) + 1)])

    equal()


@pytest.mark.parametrize("name", KINDS)
def test_any_flags(name: str):
    @QUICK
    @given(st.lists(FLAGS, min_size=len(CONTROLS), max_size=len(CONTROLS)), TEXTS, TEXTS)
    def equal(of_each: list[dict[str, bool]], first: str, second: str) -> None:
        tokens = [AddedToken(x, **y) for x, y in zip(CONTROLS, of_each, strict=True)]
        agrees(with_tokens(kind(name), tokens), [first, first + second, second])

    equal()


@pytest.mark.parametrize("name", ["gpt2", "deepseek (empty normaliser)", "metaspace first"])
def test_tokens_that_overlap(name: str):
    short = st.text("<>a| ", min_size=1, max_size=4)
    tokens = st.lists(st.tuples(short, FLAGS), min_size=1, max_size=5, unique_by=lambda x: x[0])

    @QUICK
    @given(tokens, st.lists(st.text("<>a|b ", max_size=12), min_size=1, max_size=3))
    def equal(of_each: list[tuple[str, dict[str, bool]]], texts: list[str]) -> None:
        backend = with_tokens(kind(name), [AddedToken(x, **y) for x, y in of_each])
        agrees(backend, [*texts, *("".join(texts[:x]) for x in (1, 2, 3))])

    equal()


def token(text: str, **flags: bool) -> AddedToken:
    return AddedToken(text, special=True, **{"normalized": False, **flags})


# The kind, its tokens, the text before the token that must not be a cut, and the text from it on.
COUNTEREXAMPLES = {
    "normalised, Prepend": (
        "llama 2 (Prepend, Replace)", [token("<t>", normalized=True)], "a", "<t>b"),
    "normalised, Strip": ("unigram (NFKC, Strip)", [token("<t>", normalized=True)], "a ", "<t>b"),
    "normalised, searched later": (
        "gpt2", [token("[t]", normalized=True), token("t]b")], "a ", "[t]b"),
    "lstrip": ("gpt2", [token("<t>", lstrip=True)], "a  ", "<t>b"),
    "single word": ("gpt2", [token("[t]", single_word=True)], "a ", "[t]b"),
    "begins with a blank": (
        "gpt2", [token("<u>", rstrip=True), token(" [t]", normalized=True)], "a<u>", " [t]b"),
    "ends with a blank": (
        "gpt2", [token("<w>", lstrip=True), token("[t] ", normalized=True)], "a ", "[t] <w>"),
    "a letter after a single word": (
        "gpt2", [token("<u>", single_word=True), token("tok")], "<u>", "tok"),
    "a token reaches into it": ("gpt2", [token("<t>"), token("a<t>b")], "a", "<t>b"),
    "a token contains it": ("gpt2", [token("<t>"), token("<<t>>")], "<", "<t>>"),
    "a token overlaps itself": ("gpt2", [token("aa")], "a", "aab"),
    "longer, single word": ("gpt2", [token("[t]"), token("[t]b", single_word=True)], "a ", "[t]bc"),
    "longer, lstrip": ("gpt2", [token("<t>"), token("<t>b", lstrip=True)], "a  ", "<t>bc"),
}  # fmt: skip
# The text of the self-check has no token inside another, so it does not see these.
UNSEEN = {
    *("a token contains it", "a token overlaps itself", "a token reaches into it"),
    *("normalised, searched later", "begins with a blank", "ends with a blank"),
}


@pytest.mark.parametrize("name", COUNTEREXAMPLES)
def test_a_token_that_is_refused_is_no_cut(name: str):
    of, tokens, before, rest = COUNTEREXAMPLES[name]
    backend = with_tokens(kind(of), tokens)
    assert whole(backend, before) + whole(backend, rest) != whole(backend, before + rest)
    refused = safe_cuts(backend).refused
    assert any(rest.startswith(x) for x in refused if x), refused
    agrees(backend, [before + rest])


@pytest.mark.parametrize("name", [x for x in COUNTEREXAMPLES if x not in UNSEEN])
def test_the_self_check_sees_a_wrong_rule(name: str):
    of, tokens, _, _ = COUNTEREXAMPLES[name]
    backend = with_tokens(kind(of), tokens)
    wrong = Cuts(tuple(str(x.content) for x in tokens), {})
    assert not holds(wrong, *[lambda x: whole(backend, x)] * 2)


def test_a_tokenizer_without_cuts_encodes_the_whole():
    backend = with_tokens(kind("gpt2"), controls())
    backend.model.dropout = 0.1
    cache = SegmentCache(backend, lambda text: [len(text)])
    assert cache.cuts.tokens == () and "by chance" in cache.cuts.refused[""]
    assert cache.encode("a<s>b", KEY) == [5]
    assert SegmentCache(None, lambda text: [len(text)]).encode("a<s>b", KEY) == [5]


def test_a_tokenizer_that_changes_texts_itself_has_no_cuts():
    backend = with_tokens(kind("gpt2"), controls())
    cache = SegmentCache(backend, lambda text: whole(backend, text.lower()))
    assert cache.cuts.tokens == ()


def test_special_tokens_that_are_read_as_text_are_no_cuts():
    backend = with_tokens(kind("gpt2"), controls())
    backend.encode_special_tokens = True
    assert cache_of(backend).cuts.tokens == ()
    agrees(backend, ["a<|im_start|>b"])


def test_a_backend_that_pads_or_truncates_is_not_asked():
    backend = with_tokens(kind("gpt2"), controls())
    cache = cache_of(backend)
    backend.enable_truncation(2)
    text = "a<s>the long part of it<s>b"
    assert cache.encode(text, KEY) == whole(backend, text) and cache.num_bytes == 0


def test_of_thousands_of_tokens_those_of_the_template_are_looked_for():
    backend = with_tokens(kind("gpt2"), controls())
    cache = SegmentCache(backend, lambda text: whole(backend, text), "{{ x }}<|im_end|>")
    assert cache.cuts.tokens == ("<|im_end|>",)


# ---- the cache


def chat(turns: int) -> str:
    return "".join(f"<|im_start|>user\n{'word ' * 40}{x}<|im_end|>\n" for x in range(turns))


@pytest.fixture
def cache() -> SegmentCache:
    backend = with_tokens(kind("gpt2"), controls())
    return SegmentCache(backend, lambda text: whole(backend, text))


def test_only_new_text_is_encoded(cache: SegmentCache):
    cache.encode(chat(20), KEY)
    before = cache.num_chars
    assert before == len(chat(20))
    cache.encode(chat(20) + "<|im_start|>assistant\nyes<|im_end|>\n", KEY)
    assert cache.num_chars - before < 700
    before = cache.num_chars
    cache.encode(chat(20).replace("word 3<", "other 3<"), KEY)  # an edit in the middle
    assert cache.num_chars - before < 700


def test_another_tenant_learns_nothing_from_the_time_that_it_takes(cache: SegmentCache):
    cache.encode(chat(3), b"one")
    before = cache.num_chars
    cache.encode(chat(3), b"other")
    assert cache.num_chars - before == len(chat(3))


def test_the_least_used_go_when_it_is_full():
    backend = with_tokens(kind("gpt2"), controls())
    most = 8 * (ENTRY_BYTES + 400)
    cache = SegmentCache(backend, lambda text: whole(backend, text), max_bytes=most)
    first = chat(1)
    for turns in range(2, 30):
        cache.encode(first, KEY)
        cache.encode(chat(turns).replace("word 0", "another 0"), KEY)
        assert cache.num_bytes <= 8 * (ENTRY_BYTES + 400)
    before = cache.num_chars
    cache.encode(chat(5).replace("word 0", "another 0"), KEY)
    assert cache.num_chars > before
