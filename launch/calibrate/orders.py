"""The order for a calibration, from the command line's options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from engines.config import CalibrationOrder
from engines.kv_budget import stated_context
from kvstore.chunk_size import USUAL_TOKENS
from kvstore.codecs.names import CODECS, FLOOR, OWN, split_names
from kvstore.codecs.presets import canonical_name, check_name
from kvstore.errors import UnknownCodec
from kvstore.workers import restoring_threads
from launch.errors import UsageError
from launch.model import Model
from launch.settings.effective_settings import EffectiveSettings

USUAL_CONTEXTS = "2048,6144"
USUAL_WINDOW: Final = 1024  # tokens of a text to learn from
AFTER_CONTEXT: Final = 512  # tokens after the context: the scored ones, a needle's question
MOST_CONTEXT: Final = 1 << 20  # tokens that an order may ask for
SNIFFED_BYTES: Final = 1 << 16  # of a file, to see whether it is text
# Names that stand for several presets.
GROUPS: Final[Mapping[str, Iterable[str]]] = {"ours": OWN, "usual": FLOOR, "all": CODECS}
# With what is usual elsewhere beside them: a figure alone says little.
USUAL_PRESETS: Final = "ours,usual"


@dataclass(frozen=True)
class CalibrateOptions:
    """The options of ``thermocline calibrate``, as the user wrote them."""

    texts: Sequence[Path]
    eval_texts: Sequence[Path]
    presets: str | None  # names and groups, separated by commas; None = ours and the usual
    contexts: str | None  # None = the usual ones that the model can take
    needles: bool


def order_of(
    effective: EffectiveSettings, model: Model, options: CalibrateOptions
) -> CalibrationOrder:
    """The order that these options ask for, of this model.

    Raises:
        UsageError, LaunchError: it cannot be measured; the message gives the remedy.
    """
    for path in (*options.texts, *options.eval_texts):
        _check_text(path)
    if both := {x.resolve() for x in options.texts} & {x.resolve() for x in options.eval_texts}:
        raise UsageError(f"{both.pop()} cannot be learned from and be judged by; take another")
    longest = stated_context(model.config())
    order = CalibrationOrder(
        presets=presets_of(options.presets),
        contexts=_contexts(options.contexts, longest),
        window_tokens=_window_tokens(longest),
        fit_texts=tuple(dict.fromkeys(str(x.resolve()) for x in options.texts)),
        eval_texts=tuple(dict.fromkeys(str(x.resolve()) for x in options.eval_texts)),
        chunk_tokens=effective.settings.store.chunk_tokens or USUAL_TOKENS,
        num_threads=restoring_threads(effective.settings.store.num_threads),
    )
    return order if options.needles else replace(order, depths=())


def _check_text(path: Path) -> None:
    """Raises ``UsageError`` for a file that is missing, empty or no text."""
    if not path.is_file():  # a pipe would be empty when the program comes to read it
        raise UsageError(f"{path} is no file that can be read")
    try:
        with path.open("rb") as file:
            begin = file.read(SNIFFED_BYTES)
    except OSError as error:
        raise UsageError(f"{path} is no file that can be read: {error.strerror}") from error
    if not begin.strip():
        raise UsageError(f"{path} is empty")
    if b"\0" in begin:
        raise UsageError(f"{path} is not text; give a file in UTF-8")


def presets_of(names: str | None) -> tuple[str, ...]:
    """The presets that a list of names and groups stands for, each once. Raises ``UsageError``."""
    wanted = split_names(USUAL_PRESETS if names is None else names)
    each = dict.fromkeys(preset for name in wanted for preset in GROUPS.get(name, (name,)))
    try:
        for name in each:
            check_name(name)
        return tuple(dict.fromkeys(map(canonical_name, each)))
    except UnknownCodec as error:
        raise UsageError(f"--presets: {error}") from error


def _window_tokens(longest: int | None) -> int:
    """Return the tokens of each text to learn from: fewer than usual for a short model."""
    return USUAL_WINDOW if longest is None else max(128, min(USUAL_WINDOW, longest - AFTER_CONTEXT))


def _contexts(wished: str | None, longest: int | None) -> tuple[int, ...]:
    """Context lengths to measure; ``longest`` is the model's limit, None if unknown."""
    text = USUAL_CONTEXTS if wished is None else wished
    try:
        contexts = tuple(dict.fromkeys(int(x) for x in text.split(",")))
    except ValueError:
        raise UsageError(f"--contexts {text}: write numbers of tokens, such as 2048,6144") from None
    if max(contexts) > MOST_CONTEXT:
        raise UsageError(f"--contexts {text}: {MOST_CONTEXT} tokens are the most")
    if min(contexts) < 128:
        raise UsageError(f"--contexts {text}: fewer than 128 tokens are never packed")
    most = max(contexts) if longest is None else longest - AFTER_CONTEXT
    if most < 128:
        raise UsageError(
            f"this model takes {longest} tokens; to measure it takes {128 + AFTER_CONTEXT}"
        )
    if wished is None:
        return tuple(x for x in contexts if x <= most) or (most // 128 * 128,)
    if max(contexts) > most:
        raise UsageError(
            f"--contexts {text}: this model takes {longest} tokens, of which {AFTER_CONTEXT} are"
            f" needed after the context; ask for {most} at most"
        )
    return contexts
