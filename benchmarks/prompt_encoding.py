"""Times how the mlx engine writes a long chat's prompt: the whole of it, and its next turn.

    python -m benchmarks.prompt_encoding

Prints processor time of rendering, encoding and boundaries together. *encoding whole* is what the
tokenizer alone takes for all of the text.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from mlx_lm.tokenizer_utils import load

from engines.mlx_worker.model.loading import Vocabulary
from engines.mlx_worker.prompt.chat_template import PromptWriter
from engines.mlx_worker.prompt.tools import plan_tools
from engines.openai.requests import validate_chat
from launch.machine.folders import default_cache_dir
from launch.model.sample import sample_model

T = TypeVar("T")
TURNS: Final = 43
SIZES: Final = (10_000, 50_000, 145_000)
WORDS: Final = (
    "index",
    "cache",
    "block",
    "page",
    "user",
    "time",
    "list",
    "value",
    "return",
    "path",
)
KEY: Final = b"tenant"
ROW: Final = "{:>8}  {:>14}  {:>10}  {:>9}  {}"


def cpu_ms(call: Callable[[], T]) -> tuple[float, T]:
    """Return the processor time of a call in ms, and its result."""
    began = time.process_time()
    made = call()
    return 1000 * (time.process_time() - began), made


def chat_of(num_tokens: int, vocabulary: Vocabulary) -> list[dict[str, Any]]:
    rng = random.Random(1)

    def words(count: int) -> str:
        return " ".join(rng.choice(WORDS) + str(rng.randrange(99)) for _ in range(count))

    each = len(vocabulary.tokenizer.encode(words(1000))) / 1000
    count = int(num_tokens / each / TURNS)
    messages = [{"role": "system", "content": "You are an agent."}]
    for _ in range(TURNS):
        messages.append({"role": "user", "content": words(count)})
        messages.append({"role": "assistant", "content": "Yes."})
    return [*messages, {"role": "user", "content": "Go on."}]


def row(size: int, vocabulary: Vocabulary) -> str:
    """Write a chat of about ``size`` tokens and five further turns, and return their times."""
    writer = PromptWriter(vocabulary, 1 << 20)

    def write(messages: list[dict[str, Any]]) -> Any:
        request = validate_chat({"model": "m", "messages": messages})
        return writer.chat(request, plan_tools(request, vocabulary), KEY).token_ids

    messages = chat_of(size, vocabulary)
    first_ms, ids = cpu_ms(lambda: write(messages))
    tokenizer: Any = vocabulary.tokenizer
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    encode = tokenizer.encode
    whole_ms = min(cpu_ms(lambda: encode(text, add_special_tokens=False))[0] for _ in range(3))
    later = []
    for turn in range(5):
        messages.append({"role": "assistant", "content": f"Yes, {turn}."})
        messages.append({"role": "user", "content": f"And now number {turn}?"})
        ms, ids = cpu_ms(lambda: write(messages))
        later.append(ms)
    times = (f"{x:.1f} ms" for x in (whole_ms, first_ms, min(later)))
    return ROW.format(f"{len(ids):,}", *times, f"{min(later) / whole_ms:.1%}")


def main() -> None:
    vocabulary = Vocabulary(load(sample_model(default_cache_dir(os.environ))), 49152)
    print(ROW.format("tokens", "encoding whole", "first turn", "next turn", "of the whole"))
    for size in SIZES:
        print(row(size, vocabulary))


if __name__ == "__main__":
    main()
