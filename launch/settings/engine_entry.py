"""The settings of one of several engines, an ``[[engines]]`` table. Frozen."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from engines.config import EngineConfig
from launch.errors import UsageError

_NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)


class EngineEntry(EngineConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One model and its engine; what is left out is as in ``[engine]``."""

    name: str  # what clients say as ``model``
    aliases: tuple[str, ...] = ()
    load: Literal["always", "on-demand"] = "always"
    unload_after_s: Annotated[float, msgspec.Meta(gt=0)] = 1200.0  # on demand: without a request
    share: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1  # of the machine's budgets

    def __post_init__(self) -> None:
        for name in filter(None, (self.name, *self.aliases)):
            if not _NAME.fullmatch(name) or not name.strip("."):
                raise ValueError(f"{name!r} is no name: letters, digits and ._:/- are taken")
        if self.served_model_name:
            raise ValueError("name is what clients call it; leave served_model_name out")


def check_entries(entries: Sequence[EngineEntry], given: Sequence[Mapping[str, Any]]) -> None:
    """Check that entries go together.

    Args:
        given: what stands in each, and no defaults.

    Raises:
        UsageError: two models go by one name, or one names bytes of its own.
    """
    for entry, fields in zip(entries, given, strict=True):
        if not all((entry.name, *entry.aliases)):
            raise UsageError("engines: name and aliases need at least one character")
        if "hot_bytes" in fields:
            raise UsageError(
                f"engines, {entry.name}: hot_bytes is the machine's, in [engine]; say by share how"
                " much of it this model gets, beside the other ones' share = 1"
            )
    names = [name for entry in entries for name in (entry.name, *entry.aliases)]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"engines: two models go by the name {name!r}; give each [[engines]] its own name"
            )
    folded = [entry.name.casefold() for entry in entries]
    for entry in entries:  # their folders would be one, where the disk does not know the case
        if folded.count(entry.name.casefold()) > 1:
            raise UsageError(f"engines: another model is called as {entry.name!r} is, but for case")
