"""The table of clients: lines to show, and changes to a client's own file of settings.

What the file had before is kept beside it, once. A file that cannot be read is left as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import tomlkit
from tomlkit.exceptions import TOMLKitError

from engines.files import replace_file
from launch.errors import LaunchError, UsageError

Format: TypeAlias = Literal["json", "toml", "yaml", "lines"]  # lines: KEY=VALUE, as in .env
NO_KEY: Final = "none"  # most clients want some key, also where the server needs none
# Tokens of a client's first request as it was measured (docs/clients.md): instructions and tools.
FIRST_PROMPT: Final[Mapping[str, int]] = {
    "claude": 20_000,
    "codex": 6_400,
    "opencode": 7_600,
    "qwen-code": 16_000,
}
PROVIDER: Final = "thermocline"
BACKUP_SUFFIX: Final = ".before-thermocline"
_PRIVATE: Final = 0o600  # a key may stand in it
# Readers of .env files take these as they stand.
_BARE: Final = re.compile(r"[A-Za-z0-9_./:@%+,=\\-]+")


@dataclass(frozen=True)
class Server:
    """A running server as its clients see it."""

    url: str  # without a path
    model: str
    max_context: int
    key: str = NO_KEY

    @property
    def needs_key(self) -> bool:
        return self.key != NO_KEY


@dataclass(frozen=True)
class FileChange:
    """The values that are to stand in a client's own file."""

    path: Path
    format: Format
    values: Mapping[str, Any]  # nested as in the file; None = it is not to stand there


@dataclass(frozen=True)
class Connection:
    """The needs of a client: lines for people, and a change for its file if it has one."""

    lines: list[str]
    change: FileChange | None = None
    notes: list[str] = field(default_factory=list)


def connection(client: str, server: Server, home: Path) -> Connection:
    """Say what a client needs.

    Raises:
        UsageError: that client is unknown.
        LaunchError: the server's model has no name that a file of settings can hold.
    """
    for words, value in (("a model", server.model), ("an address", server.url)):
        if not value or not value.isprintable():  # a line break would begin a setting of its own
            raise LaunchError(f"{words} with control characters cannot be used: {value!r}")
    make = CLIENTS.get(client)
    if make is None:
        raise UsageError(f"there is no client {client!r}; there are: {', '.join(sorted(CLIENTS))}")
    needs = make(server, home)
    notes = [*needs.notes, *_too_long(client, server.max_context)]
    return replace(needs, notes=notes)


def _too_long(client: str, max_context: int) -> list[str]:
    if (tokens := FIRST_PROMPT.get(client, 0)) < max_context:
        return []
    return [
        f"warning: the first prompt of {client} has about {tokens:,} tokens, and this server's"
        f" context is {max_context:,}: it will be refused. Serve a model with a longer context, or"
        " give this one more memory (--hot), if that is what cuts it."
    ]


def _claude(server: Server, home: Path) -> Connection:
    values = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key,
        "ANTHROPIC_MODEL": server.model,
        # Titles and summaries are asked of models by these names.
        "ANTHROPIC_DEFAULT_OPUS_MODEL": server.model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": server.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": server.model,
        "API_TIMEOUT_MS": "3000000",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(max(1024, server.max_context // 4)),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return Connection(
        _exports(values),
        FileChange(home / ".claude" / "settings.json", "json", {"env": values}),
        ["An ANTHROPIC_API_KEY in the environment would be sent as well: unset it."],
    )


def _codex(server: Server, home: Path) -> Connection:
    provider = {
        "name": "Thermocline",
        "base_url": f"{server.url}/v1",
        "wire_api": "responses",
        # Codex ends where this variable is named and not set.
        "env_key": "THERMOCLINE_API_KEY" if server.needs_key else None,
        "stream_idle_timeout_ms": 3_000_000,
    }
    values = {
        "model": server.model,
        "model_provider": PROVIDER,
        "model_context_window": server.max_context,
        "model_providers": {PROVIDER: provider},
    }
    kept = {key: value for key, value in provider.items() if value is not None}
    written = tomlkit.dumps({**values, "model_providers": {PROVIDER: kept}})
    shown = ["# ~/.codex/config.toml", *written.splitlines()]
    change = FileChange(home / ".codex" / "config.toml", "toml", values)
    if not server.needs_key:
        return Connection(shown, change)
    shown += _exports({"THERMOCLINE_API_KEY": server.key})
    note = "Codex reads the key from the environment: export THERMOCLINE_API_KEY in your shell."
    return Connection(shown, change, [note])


def _opencode(server: Server, home: Path) -> Connection:
    limit = {"context": server.max_context, "output": max(1024, server.max_context // 4)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Thermocline",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": server.key, "timeout": False},
        "models": {server.model: {"name": server.model, "limit": limit}},
    }
    values = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"{PROVIDER}/{server.model}",
        "provider": {PROVIDER: provider},
    }
    path = home / ".config" / "opencode" / "opencode.json"
    shown = ["// ~/.config/opencode/opencode.json", *json.dumps(values, indent=2).splitlines()]
    return Connection(shown, FileChange(path, "json", values))


def _cline(server: Server, home: Path) -> Connection:
    lines = [
        "API Provider:    OpenAI Compatible",
        f"Base URL:        {server.url}/v1",
        f"API Key:         {server.key}",
        f"Model ID:        {server.model}",
        f"Context Window:  {server.max_context}",
    ]
    return Connection(lines, None, ["Cline keeps this in its editor: enter it in its settings."])


def _qwen_code(server: Server, home: Path) -> Connection:
    values = {
        "OPENAI_BASE_URL": f"{server.url}/v1",
        "OPENAI_API_KEY": server.key,
        "OPENAI_MODEL": server.model,
    }
    return Connection(_exports(values), FileChange(home / ".qwen" / ".env", "lines", values))


def _aider(server: Server, home: Path) -> Connection:
    values = {
        "openai-api-base": f"{server.url}/v1",
        "openai-api-key": server.key,
        "model": f"openai/{server.model}",
    }
    shown = ["# ~/.aider.conf.yml", *(_yaml_line(*x) for x in values.items())]
    return Connection(shown, FileChange(home / ".aider.conf.yml", "yaml", values))


def _exports(values: Mapping[str, str]) -> list[str]:
    return [f"export {key}={_quoted(value)}" for key, value in values.items()]


def _quoted(value: str) -> str:
    return "'" + value.replace("'", "'\\''") + "'"


CLIENTS: Final[Mapping[str, Callable[[Server, Path], Connection]]] = {
    "aider": _aider,
    "claude": _claude,
    "cline": _cline,
    "codex": _codex,
    "opencode": _opencode,
    "qwen-code": _qwen_code,
}


def write(change: FileChange) -> Path | None:
    """Merge a change into its file; returns where the file's former content is, if it had any.

    Raises:
        LaunchError: the file cannot be read, merged or written; it is as it was.
    """
    path = change.path.resolve()  # a link stays a link
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        after = merged(before, change)
        path.parent.mkdir(parents=True, exist_ok=True)
        backup = _back_up(path, before)
        if after != before:
            _replace(path, after)
        return backup
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"{path} cannot be changed: {error}") from error


def merged(text: str, change: FileChange) -> str:
    """Return the file's new text.

    Raises:
        LaunchError: ``text`` is not of the file's format, or has something else in our place.
    """
    try:
        return _MERGERS[change.format](text, change)
    except (ValueError, TOMLKitError) as error:
        raise LaunchError(
            f"{change.path} is not plain {change.format.upper()} ({error}): add the lines by hand"
        ) from error


def _merged_json(text: str, change: FileChange) -> str:
    values = json.loads(text) if text.strip() else {}
    if not isinstance(values, dict):
        raise ValueError("it is no object")
    _put(values, change.values)
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def _merged_toml(text: str, change: FileChange) -> str:
    document = tomlkit.parse(text)
    _put(document, change.values)
    return tomlkit.dumps(document)


def _put(target: MutableMapping[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if value is None:
            target.pop(key, None)
            continue
        if not isinstance(value, Mapping):
            target[key] = value
            continue
        below = target.setdefault(key, {})
        if not isinstance(below, MutableMapping):
            raise ValueError(f"{key} is no table there")
        _put(target[key], value)


def _merged_yaml(text: str, change: FileChange) -> str:
    return _with_lines(text, {f"{key}:": _yaml_line(key, x) for key, x in change.values.items()})


def _merged_dotenv(text: str, change: FileChange) -> str:
    return _with_lines(text, {f"{key}=": _dotenv_line(key, x) for key, x in change.values.items()})


def _with_lines(text: str, ours: Mapping[str, str]) -> str:
    """Put lines in the place of those that begin alike, spaces apart; the others stay."""
    lines = text.removesuffix("\n").split("\n") if text else []
    for beginning, line in ours.items():
        key, separator = re.escape(beginning[:-1]), re.escape(beginning[-1])
        same = re.compile(rf"(?:export\s+)?{key}\s*{separator}")
        places = [i for i, x in enumerate(lines) if same.match(x)]
        if places:
            lines[places[-1]] = line  # of several the last one counts
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def _yaml_line(key: str, value: str) -> str:
    """Write a value in double quotes, which YAML reads as JSON does. Raises ``ValueError``."""
    return f"{key}: {json.dumps(_printable(value), ensure_ascii=False)}"


def _dotenv_line(key: str, value: str) -> str:
    """Write a value so that all readers of .env files read it back; they differ in escapes.

    Raises ``ValueError`` for one that some would change.
    """
    if _BARE.fullmatch(_printable(value)):
        return f"{key}={value}"
    for quote in "'\"":
        if quote not in value and "\\" not in value:
            return f"{key}={quote}{value}{quote}"
    raise ValueError(f"a value with quotes and backslashes cannot be written: {value!r}")


def _printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError("a value has control characters")
    return value


_MERGERS: Final[Mapping[Format, Callable[[str, FileChange], str]]] = {
    "json": _merged_json,
    "toml": _merged_toml,
    "yaml": _merged_yaml,
    "lines": _merged_dotenv,
}


def _back_up(path: Path, text: str) -> Path | None:
    if not text:
        return None
    backup = path.with_name(path.name + BACKUP_SUFFIX)
    if not backup.exists():  # the first one holds what was the user's own
        _replace(backup, text)
    return backup


def _replace(path: Path, text: str) -> None:
    """Write a file at once or not at all; a new one is private, an old one keeps its mode."""
    mode = path.stat().st_mode & 0o777 if path.exists() else _PRIVATE
    replace_file(path, text.encode(), mode)
