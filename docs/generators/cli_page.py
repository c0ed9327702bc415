"""``docs/reference/cli.md``: every command, its arguments and options."""

from __future__ import annotations

from collections.abc import Iterator

from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from docs.generators.tables import code, page, table
from launch.cli.main import app

INTRODUCTION = """
A command that is called wrongly ends with exit code 2, one that fails with 1; both print one
sentence to standard error. The commands that need a setting have it as an option; [any other
source of settings](../configuration.md#sources) works as well.
"""


def cli_page() -> str:
    root = get_command(app)
    assert isinstance(root, TyperGroup)
    parts = [root.help or "", INTRODUCTION]
    if options := _options(root):
        parts.append(table(("option", "meaning"), options))
    for words, command in _commands("thermocline", root):
        parts += _about(words, command)
    return page("Command line", *parts)


def _commands(words: str, group: TyperGroup) -> Iterator[tuple[str, TyperCommand]]:
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if isinstance(command, TyperGroup):
            yield from _commands(f"{words} {name}", command)
        else:
            assert isinstance(command, TyperCommand)
            yield f"{words} {name}", command


def _about(words: str, command: TyperCommand) -> list[str]:
    arguments = [x for x in command.params if isinstance(x, TyperArgument)]
    usage = " ".join([words, *(_shape(x) for x in arguments)])
    parts = [f"## {words}", (command.help or "").strip(), f"    {usage}"]
    rows = [(code(_shape(x)), x.help or "") for x in arguments] + _options(command)
    if rows:
        parts.append(table(("", "meaning"), rows))
    return parts


def _shape(argument: TyperArgument) -> str:
    name = (argument.metavar or argument.name or "").upper()
    if argument.nargs == -1 and not name.endswith("..."):
        name += "..."
    return name if argument.required else f"[{name}]"


def _options(command: TyperCommand | TyperGroup) -> list[tuple[str, str]]:
    options = [x for x in command.params if isinstance(x, TyperOption) and not x.hidden]
    return [(code(_spelling(x)), _meaning(x)) for x in options]


def _spelling(option: TyperOption) -> str:
    names = ", ".join([*option.opts, *option.secondary_opts])
    if option.is_flag or option.count:
        return names
    return f"{names} {option.metavar or (option.name or '').upper()}"


def _meaning(option: TyperOption) -> str:
    words = [option.help or ""]
    if option.envvar:
        words.append(f"Variable: `{option.envvar}`.")
    if isinstance(option.default, str | int | float) and option.default not in ("", False, None):
        words.append(f"Default: `{str(option.default).lower()}`.")
    return " ".join(words)
