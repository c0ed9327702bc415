"""The cache classes of engines that can be served and kept cold, and reasons for the others.

The engine looks at the caches that a model really makes; ``thermocline plan`` knows from
config.json which they will be. Both refuse in the same words.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

GROWING: Final = frozenset(("KVCache", "PackedKVCache"))
# The state of these cannot be cut back to an earlier token.
STATEFUL: Final = frozenset(("RotatingKVCache", "ArraysCache"))
# On vLLM.
LATENT_ON_CPU: Final = (
    "vLLM reuses no prefixes of models with latents (MLA) on this processor; choose the mlx engine"
)
INDEX_ON_VLLM: Final = (
    "beside its latents (MLA) the model keeps the keys of an index, in a form not known here"
)
NOTHING_GROWS_ON_VLLM: Final = (
    "no layer of the model keeps all tokens, so that little would be gained"
)


def cannot_batch(class_name: str) -> str:
    """Say why a model with such a cache cannot be served."""
    return (
        f"mlx_lm cannot batch the {class_name} of this model, so it cannot be served; choose"
        " another model"
    )


def cannot_keep(class_names: Iterable[str]) -> str:
    """Say why sessions of a model with these caches cannot be kept cold; "" if they can."""
    strange = sorted({*class_names} - GROWING - STATEFUL)
    return f"its caches of class {', '.join(strange)} are not known here" if strange else ""
