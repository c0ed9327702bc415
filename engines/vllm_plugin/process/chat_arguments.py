"""Makes the part of vLLM's command line that configures tool calls and reasoning."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from engines.about_vllm.model_files import model_folder, read_model_files
from engines.about_vllm.parsers import needs_tool_template, parsers_for
from engines.about_vllm.tool_template import with_tools
from engines.config import VllmConfig, WorkerConfig

logger = logging.getLogger("thermocline.vllm")

TEMPLATE_FILE: Final = "chat_template.jinja"
FORCED_CALLS: Final = "engines.vllm_plugin.process.forced_calls"
SMALL_FILES: Final = ("config.json", "tokenizer_config.json", TEMPLATE_FILE)


def chat_arguments(worker: WorkerConfig) -> list[str]:
    """Name the parsers of the model's family, and a chat template if its own handles no tools.

    An option that the user sets in ``engine.vllm.args`` is not added here.
    """
    own = worker.engine.vllm
    files = read_model_files(model_folder(worker.model_path) or _fetched(worker.model_path))
    chosen = parsers_for(files, own)
    argv = []
    if chosen.tool_calls and not _said("--tool-call-parser", own):
        argv += ["--enable-auto-tool-choice", "--tool-call-parser", chosen.tool_calls]
        if needs_tool_template(files, chosen) and not _said("--chat-template", own):
            path = Path(worker.runtime_dir) / TEMPLATE_FILE
            path.write_text(with_tools(files.template), encoding="utf-8")
            argv += ["--chat-template", str(path)]
    if not _said("--tool-parser-plugin", own):
        argv += ["--tool-parser-plugin", FORCED_CALLS]
    if chosen.reasoning and not _said("--reasoning-parser", own):
        argv += ["--reasoning-parser", chosen.reasoning]
    return argv


def _said(option: str, own: VllmConfig) -> bool:
    return any(x == option or x.startswith(option + "=") for x in own.args)


def _fetched(hub_id: str) -> Path | None:
    """Fetch the small files of a model that vLLM will later download completely."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(hub_id, allow_patterns=list(SMALL_FILES)))
    except Exception as error:  # vLLM will get any such error too, and describe it better
        logger.warning("the files of %s that name its tool parser are not here: %s", hub_id, error)
        return None
