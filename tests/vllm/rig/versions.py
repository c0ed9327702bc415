"""The differences between the supported releases of vLLM; no other module checks the release."""

from __future__ import annotations

import vllm

if str(vllm.__version__).startswith("0.32."):
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
else:
    from vllm.entrypoints.common.cli_args import make_arg_parser

__all__ = ["make_arg_parser"]
