"""Small tokenizers of every kind that chat models use, trained on this project's own pages."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CONTROLS: Final = (
    *("<|im_start|>", "<|im_end|>", "<s>", "</s>"),
    *("<｜User｜>", "[INST]", "<tool_call>"),
)
_LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN: Final = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# Some tests need words such as " [", which the pages may lack.
_WORDS: Final = [
    *["see [1], a <b> or [c] and <d>: a\n\nb"] * 99,
    *["Größe naïve café ﬁne \U0001f600\U0001f3fd 東京 дом ½ Ⅷ ①"] * 2,
]


@functools.cache
def pages() -> list[str]:
    root = Path(__file__).parents[4]
    found = sorted([*root.glob("*.md"), *root.glob("docs/*.md")])[:12]
    return [*(x.read_text("utf-8")[:12_000] for x in found), *_WORDS]


def controls(*, special: bool = True, **flags: bool) -> list[AddedToken]:
    return [AddedToken(x, special=special, **{"normalized": False, **flags}) for x in CONTROLS]


def with_tokens(backend: Tokenizer, tokens: Iterable[AddedToken]) -> Tokenizer:
    made = Tokenizer.from_str(backend.to_str())
    for token in tokens:
        add = made.add_special_tokens if token.special else made.add_tokens
        add([token])
    return made


def _byte_level(pre: Any, normalizer: Any = None, **model: Any) -> Tokenizer:
    made = Tokenizer(models.BPE(**model))
    made.pre_tokenizer = pre
    if normalizer is not None:
        made.normalizer = normalizer
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(pages(), trainer)
    return made


def _metaspace(pre: Any, normalizer: Any = None) -> Tokenizer:
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if pre is not None:
        made.pre_tokenizer = pre
    if normalizer is not None:
        made.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=["<unk>", *(f"<0x{x:02X}>" for x in range(256))],
        limit_alphabet=200,
        show_progress=False,
    )
    made.train_from_iterator([y for x in pages() for y in x.splitlines() if y][:1500], trainer)
    # The trainer adds its special tokens to those that texts are split at; bytes are not.
    content = json.loads(made.to_str())
    content["added_tokens"] = [x for x in content["added_tokens"] if x["content"] == "<unk>"]
    return Tokenizer.from_str(json.dumps(content))


def _isolated(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def _bytes_of_words(*patterns: str) -> Any:
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*map(_isolated, patterns), last])


def _unigram() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    one_blank = normalizers.Replace(Regex(" {2,}"), " ")
    made.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), one_blank, normalizers.Strip(False, True)]
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=700, unk_token="<unk>", special_tokens=["<unk>", "<s>"], show_progress=False
    )
    made.train_from_iterator(pages(), trainer)
    return made


def _word_piece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=900, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    made.train_from_iterator(pages(), trainer)
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return made


def _deepseek() -> Tokenizer:
    words = _bytes_of_words(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _LLAMA3)
    return _byte_level(words, normalizers.Sequence([]))


def _llama2() -> Tokenizer:
    marks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    return _metaspace(None, normalizers.Sequence(marks))


def _gemma() -> Tokenizer:
    words = pre_tokenizers.Split(" ", "merged_with_previous")
    return _metaspace(words, normalizers.Replace(" ", "▁"))


def _with_digits() -> Tokenizer:
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _byte_level(pre_tokenizers.Sequence([pre_tokenizers.Digits(True), words]))


KINDS: Final = {
    "gpt2": lambda: _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "gpt2 with prefix space": lambda: _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "digits then byte level": _with_digits,
    "llama 3": lambda: _byte_level(_bytes_of_words(_LLAMA3), ignore_merges=True),
    "qwen (NFC)": lambda: _byte_level(_bytes_of_words(_QWEN), normalizers.NFC()),
    "deepseek (empty normaliser)": _deepseek,
    "llama 2 (Prepend, Replace)": _llama2,
    "gemma (Replace)": _gemma,
    "metaspace first": lambda: _metaspace(pre_tokenizers.Metaspace(prepend_scheme="first")),
    "metaspace first, unsplit": lambda: _metaspace(
        pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    ),
    "metaspace always": lambda: _metaspace(pre_tokenizers.Metaspace(prepend_scheme="always")),
    "metaspace never": lambda: _metaspace(pre_tokenizers.Metaspace(prepend_scheme="never")),
    "unigram (NFKC, Strip)": _unigram,
    "word piece (lower case)": _word_piece,
}


@functools.cache
def kind(name: str) -> Tokenizer:
    """A trained tokenizer without control tokens; it must not be changed."""
    return KINDS[name]()
