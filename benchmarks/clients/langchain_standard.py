"""LangChain's standard tests of a chat model; ``sdks.py`` runs them with the clients' Python."""

from __future__ import annotations

import os
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestChat(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "base_url": os.environ["SDK_BASE_URL"],
            "api_key": "none",
            "model": os.environ["SDK_MODEL"],
            "max_tokens": 100,
            "temperature": 0,
            "stream_usage": True,
        }
