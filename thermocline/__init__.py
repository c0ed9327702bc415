"""The public names of Thermocline as a library; each is imported when it is first used.

    import thermocline
    method = thermocline.codec("tq3")
    packed = method.pack(keys)           # (heads, tokens, dim)
    keys = method.restore(packed)

``docs/library.md`` shows the rest; ``thermocline.mlx`` has caches for mlx_lm. The package is a thin
layer over the code that the server runs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvstore.codecs.catalogue import Parameter as Parameter
    from kvstore.codecs.learning.samples import Samples as Samples
    from kvstore.codecs.profile import Profile as Profile
    from kvstore.codecs.quality import Quality as Quality
    from kvstore.codecs.registration import register as register
    from kvstore.errors import Corrupt as Corrupt
    from kvstore.errors import Mismatch as Mismatch
    from kvstore.errors import UnknownCodec as UnknownCodec
    from kvstore.shapes import KVLayer as KVLayer
    from kvstore.shapes import KVLayout as KVLayout
    from thermocline.by_layer import per_layer as per_layer
    from thermocline.catalogue import CodecInfo as CodecInfo
    from thermocline.catalogue import codebook as codebook
    from thermocline.catalogue import codec as codec
    from thermocline.catalogue import codecs as codecs
    from thermocline.layouts import layout_of as layout_of
    from thermocline.measuring import judge as judge
    from thermocline.measuring import learn as learn
    from thermocline.method import Method as Method
    from thermocline.packed import Packed as Packed
    from thermocline.pair import simple as simple

# Each public name, and the module that defines it.
NAMES: Final = {
    "CodecInfo": "thermocline.catalogue",
    "Corrupt": "kvstore.errors",
    "KVLayer": "kvstore.shapes",
    "KVLayout": "kvstore.shapes",
    "Method": "thermocline.method",
    "Mismatch": "kvstore.errors",
    "Packed": "thermocline.packed",
    "Parameter": "kvstore.codecs.catalogue",
    "Profile": "kvstore.codecs.profile",
    "Quality": "kvstore.codecs.quality",
    "Samples": "kvstore.codecs.learning.samples",
    "UnknownCodec": "kvstore.errors",
    "codebook": "thermocline.catalogue",
    "codec": "thermocline.catalogue",
    "codecs": "thermocline.catalogue",
    "judge": "thermocline.measuring",
    "layout_of": "thermocline.layouts",
    "learn": "thermocline.measuring",
    "per_layer": "thermocline.by_layer",
    "register": "kvstore.codecs.registration",
    "simple": "thermocline.pair",
}
__all__ = sorted(NAMES)


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module 'thermocline' has no attribute {name!r}")
    return getattr(importlib.import_module(NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *NAMES])
