"""Settings in which constants differ, too: a test cannot wait for as long as users do."""

from __future__ import annotations

import types
from typing import Any, TypeVar

import msgspec

C = TypeVar("C", bound=msgspec.Struct)


def configured(kind: type[C], /, **values: Any) -> C:
    """Make settings; what is a constant of theirs has its value in a subclass."""
    constants = {x: values.pop(x) for x in [*values] if x not in kind.__struct_fields__}
    if unknown := [x for x in constants if not hasattr(kind, x)]:
        raise TypeError(f"{kind.__name__} has no {unknown[0]}")
    if constants:
        kind = types.new_class(
            kind.__name__, (kind,), exec_body=lambda body: body.update(constants)
        )
    return msgspec.convert(values, kind)
