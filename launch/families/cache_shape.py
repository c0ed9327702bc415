"""The shape of a session's live cache, which model families compute from config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from engines.kv_budget import KVCost
from kvstore.shapes import NUMPY_DTYPES, DType, KVLayer, KVLayout, StateLayout

if TYPE_CHECKING:
    from kvstore.codecs.session_codec import SessionCodec


FLOAT32_BYTES = 4
# Defaults of fields that a nested text model may leave out.
_NESTED_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "gemma3": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    "gemma4": {"num_attention_heads": 8, "num_key_value_heads": 1},
    "gemma4_unified": {"num_attention_heads": 8, "num_key_value_heads": 1},
    "pixtral": {"num_attention_heads": 32},
}


class NotUnderstood(Exception):
    """The cache of this model cannot be computed from its config.json; the message says why."""


class ModelRefused(NotUnderstood):
    """The engine cannot serve this model at all; the message says why."""


@dataclass(frozen=True)
class Window:
    """An attention layer that keeps only the newest ``longest`` tokens."""

    layer: KVLayer
    longest: int


@dataclass(frozen=True)
class CacheShape:
    """The cache of one session, layer by layer.

    Growing layers are packed by a codec. Windows and recurrent state cannot be cut back to an
    earlier token, so copies of them, taken at ends of chunks, are stored as states. These are
    packed if a measurement allows it.
    """

    growing: tuple[KVLayer, ...] = ()
    windows: tuple[Window, ...] = ()
    state_elements: int = 0  # recurrent state in the engine's dtype (convolutions)
    state_float32: int = 0  # recurrent state that is float32 in every dtype of the engine
    num_states: int = 0  # layers with recurrent state
    # The row width of the matrices that ``state_float32`` counts; 0 = they are not matrices.
    state_width: int = 0
    # Growing layers hold one latent for all heads, with its rotary part in the place of values.
    has_latents: bool = False
    exact_only: str = ""  # why a lossy codec must not pack this cache; "" = it may
    notes: tuple[str, ...] = field(default=())

    @property
    def needs_state(self) -> bool:
        return bool(self.windows) or self.is_recurrent

    @property
    def is_recurrent(self) -> bool:
        """True if some layers have a recurrent state, such as the last inputs of a convolution."""
        return bool(self.state_elements or self.state_float32)

    @property
    def elements_per_token(self) -> int:
        """The number of values that all growing layers keep for one token."""
        return sum(_width(layer) for layer in self.growing)

    def state_bytes(self, num_tokens: int, itemsize: int) -> int:
        """Return the bytes of windows and recurrent state after ``num_tokens``."""
        windows = sum(_width(w.layer) * min(num_tokens, w.longest) for w in self.windows)
        return (windows + self.state_elements) * itemsize + self.state_float32 * FLOAT32_BYTES

    def states(self, dtype: DType) -> StateLayout | None:
        """Return the layout of the states that a ``SessionCodec`` may pack; None = no states.

        It is the layout that an mlx engine finds, except that matrices in the engine's own dtype
        are left out: they count as stored exactly.
        """
        if not self.needs_state:
            return None
        lengths = {w.longest for w in self.windows}
        alike = lengths.pop() if len(lengths) == 1 else 0
        windows = KVLayout(dtype, tuple(w.layer for w in self.windows)) if alike else None
        return StateLayout(windows, alike, self.state_width > 0)

    def kept_state_bytes(self, codec: SessionCodec | None, dtype: DType, num_tokens: int) -> int:
        """Return the bytes of one state in the cold store, without rows of windows kept as chunks.

        ``codec``: packs the matrices; None = all is stored exactly.
        """
        total = self.state_bytes(num_tokens, NUMPY_DTYPES[dtype].itemsize)
        states = self.states(dtype)
        if states is not None and states.windows is not None:
            held = min(num_tokens, states.window_tokens)
            total -= held * states.windows.bytes_per_token
        if codec is not None and self.state_width and not codec.matrices.exact:
            rows = self.state_float32 // self.state_width
            total -= self.state_float32 * FLOAT32_BYTES
            total += codec.matrices.nbytes(rows, self.state_width)
        return total

    def hot_bytes(self, num_tokens: int, itemsize: int) -> int:
        """Return the bytes of the live cache after ``num_tokens``, with ``itemsize`` per value."""
        growing = self.elements_per_token * num_tokens * itemsize
        return growing + self.state_bytes(num_tokens, itemsize)

    def cost(self, itemsize: int) -> KVCost:
        """Return the cost of mlx_lm's caches, as ``engines.kv_budget`` computes it."""
        return KVCost(
            per_token=self.elements_per_token * itemsize,
            windows=tuple((_width(w.layer) * itemsize, w.longest) for w in self.windows),
            fixed=self.state_bytes(0, itemsize),
            num_caches=max(1, len(self.growing) + len(self.windows) + self.num_states),
        )


def _width(layer: KVLayer) -> int:
    return layer.num_kv_heads * (layer.head_dim + layer.value_dim)


class Config:
    """The fields of a config.json; those of a nested text model replace the outer ones."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        inner, kind = content.get("text_config"), content.get("model_type")
        self._content: Mapping[str, Any] = content
        self.outer_type = str(kind)
        if isinstance(inner, dict):
            defaults = _NESTED_DEFAULTS.get(str(kind), {})
            self._content = {"model_type": kind, **defaults, **inner}

    @property
    def model_type(self) -> str:
        return str(self._content.get("model_type"))

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a positive integer, or ``default`` if the field is absent.

        Raises ``NotUnderstood`` for any other value, and if there is neither.
        """
        value = self._content.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise NotUnderstood(f"its config.json has {name} = {value!r}, a number is needed")
        return value

    def several(self, *names: str) -> list[int]:
        """Return several positive integers, in the order of ``names``. Raises ``NotUnderstood``."""
        return [self.integer(name) for name in names]

    def count(self, name: str) -> int:
        """Return an integer that may be 0. Raises ``NotUnderstood`` if it is absent or another."""
        return 0 if self._content.get(name) == 0 else self.integer(name)

    def integers(self, name: str) -> list[int]:
        """Return a list of integers. Raises ``NotUnderstood`` if the field is not one."""
        value = self._content.get(name)
        if not isinstance(value, list) or any(type(x) is not int for x in value):
            raise NotUnderstood(f"its config.json has {name} = {value!r}, numbers are needed")
        return value

    def words(self, name: str) -> list[str]:
        """Return a list of words, one for each layer; empty if the field is not a list."""
        value = self._content.get(name)
        return [str(word) for word in value] if isinstance(value, list) else []

    def text(self, name: str) -> str:
        """Return a word; "" if the field is not text."""
        value = self._content.get(name)
        return value if isinstance(value, str) else ""

    def section(self, name: str) -> Config:
        """Return the fields of a nested object. Raises ``NotUnderstood`` if there is none."""
        value = self._content.get(name)
        if not isinstance(value, dict):
            raise NotUnderstood(f"its config.json has no {name}")
        return Config(value)

    def sections(self, name: str) -> list[Config]:
        """Return a list of nested objects. Raises ``NotUnderstood`` if the field is not one."""
        value = self._content.get(name)
        if not isinstance(value, list) or any(not isinstance(x, dict) for x in value):
            raise NotUnderstood(f"its config.json has no list {name}")
        return [Config(x) for x in value]

    def has(self, name: str) -> bool:
        """Return True if the field is present and not null."""
        return self._content.get(name) is not None

    def flag(self, name: str) -> bool:
        return bool(self._content.get(name))

    def layer_types(self, default: list[str]) -> list[str]:
        """Return ``layer_types`` or ``default``, one word for each layer.

        Raises ``NotUnderstood`` if their number differs from that of the layers.
        """
        num_layers = self.integer("num_hidden_layers")
        types = self.words("layer_types") or default
        if len(types) != num_layers:
            raise NotUnderstood(f"its layer_types names {len(types)} of {num_layers} layers")
        return types


Family: TypeAlias = Callable[[Config], CacheShape]
