"""A live cache: generate from packed rows, and find a needle in them.

    pip install '.[mlx]'
    python -m docs.tutorials.live_cache [--plot live_cache.png]

``thermocline.mlx.make_cache`` takes the place of mlx_lm's own cache. It keeps the first four and
the newest 64 to 127 tokens in 16 bits and packs all others, and ``attending`` lets the model attend
to packed rows without restoring them. The sample model reads a text with a pass key in its middle
and is asked for the key, once with each cache.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.families.fast_blas import begin_with_blas
from docs.tutorials.picture import draw, path_of_picture

KEY = "71942"
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. "
QUESTION = "What is the pass key? The pass key is"
CODECS = ("tq3", "tq4")


@dataclass(frozen=True)
class Found:
    """The answer with one cache, and the cache's size."""

    cache: str
    num_tokens: int
    nbytes: int  # of the cache
    answer: str


def prompt(num_sentences: int) -> str:
    """Return a text with a pass key in its middle, and the question for it."""
    half = FILLER * (num_sentences // 2)
    return f"{half}The pass key is {KEY}. Remember it. {KEY} is the pass key. {half}{QUESTION}"


def asked(model: Any, tokenizer: Any, cache: list[Any], name: str, text: str) -> Found:
    """Return the model's answer to ``text``, generated with ``cache``."""
    import mlx_lm

    tokens = tokenizer.encode(text)
    answer = mlx_lm.generate(model, tokenizer, tokens, prompt_cache=cache, max_tokens=8)
    return Found(name, len(tokens), sum(layer.nbytes for layer in cache), answer)


def measured(model: Any, tokenizer: Any, num_sentences: int = 24) -> list[Found]:
    """Return the answers with mlx_lm's own cache and with a packed one of each codec."""
    from mlx_lm.models.cache import make_prompt_cache

    import thermocline.mlx

    text = prompt(num_sentences)
    found = [asked(model, tokenizer, make_prompt_cache(model), "plain", text)]
    with thermocline.mlx.attending(model):
        for codec in CODECS:
            cache = thermocline.mlx.make_cache(model, codec)
            found.append(asked(model, tokenizer, cache, codec, text))
    return found


def sample_folder() -> Path:
    """Return the folder of the sample model; download the model if needed."""
    from launch.machine.folders import default_cache_dir
    from launch.model.find import sample_model

    return sample_model(default_cache_dir(os.environ))


def main(arguments: Sequence[str] | None = None) -> None:
    picture = path_of_picture(__doc__, arguments)
    import mlx.core as mx
    import mlx_lm

    model, tokenizer, *_ = mlx_lm.load(str(sample_folder()))
    model.set_dtype(mx.float32)  # as the server does on a CPU
    rows = measured(model, tokenizer)
    print("cache  tokens   KiB  answer")
    for row in rows:
        print(f"{row.cache:5}  {row.num_tokens:6}  {row.nbytes >> 10:4}  {row.answer.strip()!r}")
    if picture is not None:
        draw(picture, lambda axes: _bars(axes, rows))


def _bars(axes, rows: Sequence[Found]) -> None:
    axes.bar([x.cache for x in rows], [x.nbytes / 2**20 for x in rows], color="tab:blue")
    for place, row in enumerate(rows):
        verdict = "key found" if KEY in row.answer else "key missed"
        axes.annotate(verdict, (place, row.nbytes / 2**20), ha="center", va="bottom")
    axes.set(title=f"Cache of {rows[0].num_tokens} tokens", ylabel="MiB")
    axes.margins(y=0.15)


if __name__ == "__main__":
    begin_with_blas("docs.tutorials.live_cache")
    main()
