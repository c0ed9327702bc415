"""Reads the config.json of a text model, with answers that name what is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from launch.families.cache_shape import CacheShape, NotUnderstood

# Fields that a nested text model may leave out, and their values then.
_NESTED_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "gemma3": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    "gemma4": {"num_attention_heads": 8, "num_key_value_heads": 1},
    "gemma4_unified": {"num_attention_heads": 8, "num_key_value_heads": 1},
    "pixtral": {"num_attention_heads": 32},
}


class Config:
    """config.json of the text model; what a multimodal model nests is in place of the outer."""

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
        """Raises ``NotUnderstood`` unless it is a positive integer, or absent with a default."""
        value = self._content.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise NotUnderstood(f"its config.json has {name} = {value!r}, a number is needed")
        return value

    def count(self, name: str) -> int:
        """A number that may be 0; raises ``NotUnderstood`` if it is absent or anything else."""
        return 0 if self._content.get(name) == 0 else self.integer(name)

    def integers(self, name: str) -> list[int]:
        """A list of numbers; raises ``NotUnderstood`` if it is none."""
        value = self._content.get(name)
        if not isinstance(value, list) or any(type(x) is not int for x in value):
            raise NotUnderstood(f"its config.json has {name} = {value!r}, numbers are needed")
        return value

    def words(self, name: str) -> list[str]:
        """A list of words, one per layer; empty if there is none."""
        value = self._content.get(name)
        return [str(word) for word in value] if isinstance(value, list) else []

    def text(self, name: str) -> str:
        """A word; empty if there is none."""
        value = self._content.get(name)
        return value if isinstance(value, str) else ""

    def section(self, name: str) -> Config:
        """A part with fields of its own. Raises ``NotUnderstood`` if there is none."""
        value = self._content.get(name)
        if not isinstance(value, dict):
            raise NotUnderstood(f"its config.json has no {name}")
        return Config(value)

    def sections(self, name: str) -> list[Config]:
        """A list of such parts. Raises ``NotUnderstood`` if there is none."""
        value = self._content.get(name)
        if not isinstance(value, list) or any(not isinstance(x, dict) for x in value):
            raise NotUnderstood(f"its config.json has no list {name}")
        return [Config(x) for x in value]

    def has(self, name: str) -> bool:
        """True if it is there and not null."""
        return self._content.get(name) is not None

    def flag(self, name: str) -> bool:
        return bool(self._content.get(name))

    def layer_types(self, default: list[str]) -> list[str]:
        """``layer_types``, one word per layer. Raises ``NotUnderstood``: not as many as layers."""
        num_layers = self.integer("num_hidden_layers")
        types = self.words("layer_types") or default
        if len(types) != num_layers:
            raise NotUnderstood(f"its layer_types names {len(types)} of {num_layers} layers")
        return types


Family: TypeAlias = Callable[[Config], CacheShape]
