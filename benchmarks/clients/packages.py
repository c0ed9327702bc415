"""The clients' packages in exact versions; installs them into a folder outside the checkout."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

CACHE: Final = "~/.cache/thermocline/agents"
NPM: Final[Mapping[str, str]] = {
    "@anthropic-ai/claude-code": "2.1.332",
    "@openai/codex": "0.171.0",
    "@qwen-code/qwen-code": "0.24.4",
    "opencode-ai": "1.18.33",
    "openai": "6.49.0",
    "ai": "6.0.326",
    "@ai-sdk/anthropic": "3.0.139",
    "@ai-sdk/openai": "3.0.141",
    "@ai-sdk/openai-compatible": "2.0.91",
    "zod": "4.6.7",
}
PYPI: Final[Mapping[str, tuple[str, ...]]] = {
    "aider": ("aider-chat==0.86.2",),
    "sdks": (
        "anthropic==2.12.0",
        "openai==2.54.0",  # litellm wants one below 3
        "openai-agents==0.20.0",
        "litellm==1.106.2",
        "instructor==1.17.0",
        "pydantic-ai-slim[openai,anthropic]==2.31.1",
        "langchain-openai==1.7.3",
        "langchain-anthropic==1.7.7",
        "langchain-tests==1.1.9",
        "pytest==9.2.0",
    ),
    "fuzz": ("schemathesis==4.32.5",),
    "open-webui": ("open-webui==0.12.4",),
}


def npm(cache: Path, *names: str) -> Path:
    """Install packages of npm that are missing or of another version; return their folder."""
    folder = cache / "npm"
    folder.mkdir(parents=True, exist_ok=True)
    missing = [f"{x}@{NPM[x]}" for x in names if _npm_version(folder, x) != NPM[x]]
    if missing:
        run(["npm", "install", "--silent", "--save-exact", "--prefix", str(folder), *missing])
    return folder


def _npm_version(folder: Path, name: str) -> str:
    about = folder / "node_modules" / name / "package.json"
    return str(json.loads(about.read_text())["version"]) if about.exists() else ""


def pypi(cache: Path, name: str) -> Path:
    """Return the folder of commands of an environment with Python packages; make it if needed.

    ``name``: a key of ``PYPI``.
    """
    folder = cache / "pypi" / name
    listed = folder / "installed.txt"
    wanted = "\n".join(PYPI[name])
    if not listed.exists() or listed.read_text() != wanted:
        run([sys.executable, "-m", "venv", "--clear", str(folder)])
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        run([*pip, *PYPI[name]])
        listed.write_text(wanted)
    return folder / "bin"


def run(command: list[str], folder: Path | None = None) -> None:
    """Run a command without its standard output; raise ``CalledProcessError`` if it fails."""
    subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
