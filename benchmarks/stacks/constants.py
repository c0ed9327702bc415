"""Settings with other constants: tests cannot wait as long as the product's constants say."""

from __future__ import annotations

import types
from typing import Any, TypeVar

import msgspec

C = TypeVar("C", bound=msgspec.Struct)


def configured(kind: type[C], /, **values: Any) -> C:
    """Return settings of ``kind``; values of class constants are set in a subclass of it.

    Raises ``TypeError`` if ``kind`` has neither a field nor a constant of a name.
    """
    constants = {x: values.pop(x) for x in [*values] if x not in kind.__struct_fields__}
    if unknown := [x for x in constants if not hasattr(kind, x)]:
        raise TypeError(f"{kind.__name__} has no {unknown[0]}")
    if constants:
        kind = types.new_class(
            kind.__name__, (kind,), exec_body=lambda body: body.update(constants)
        )
    return msgspec.convert(values, kind)
