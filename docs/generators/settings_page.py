"""``docs/reference/settings.md``: what every setting takes, and its default."""

from __future__ import annotations

from docs.generators.tables import code, page, table
from launch.cli.options import FLAGS
from launch.settings.kinds import takes
from launch.settings.schema import Settings, flat
from launch.settings.sources import Fields
from launch.settings.units import shown

INTRODUCTION = """
For those who look up a setting: the values that it takes, and its default. Defaults are those
before a profile is applied and budgets in bytes are fitted to the machine; `thermocline config`
shows the values on your machine and their sources. [Configuration](../configuration.md) explains
what the settings do.

Every setting can be given by an environment variable: `engine.hot_bytes` by
`THERMOCLINE_ENGINE__HOT_BYTES`. Flags are those of `thermocline serve`; settings without one are
set by `--set NAME=VALUE`.
"""


def settings_page() -> str:
    fields = Fields(Settings)
    values = flat(Settings())
    flags = {setting: flag for flag, setting in FLAGS.items()}
    parts = [INTRODUCTION]
    for section in ["", *fields.sections]:
        rows = [
            (
                code(name),
                takes(name, kind, code),
                _default(name, values[name]),
                code(flags.get(name, "")),
            )
            for name, kind in fields.types.items()
            if name.rpartition(".")[0] == section
        ]
        parts.append(f"## {code(section) or 'Top level'}")
        parts.append(table(("setting", "takes", "default", "flag"), rows))
    return page("Settings", *parts)


def _default(name: str, value: object) -> str:
    text = {"True": "true", "False": "false", "None": ""}.get(str(value), shown(name, value))
    return code(text)
