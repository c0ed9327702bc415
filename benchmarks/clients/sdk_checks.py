"""Asks a server through Python clients; prints "name<TAB>version<TAB>ok" or what went wrong.

Started by ``sdks.py`` with the interpreter of the environment where the clients are.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

URL, MODEL = sys.argv[1:3]
BASE = f"{URL}/v1"
ASK = "hello big world"
os.environ |= {"OPENAI_API_KEY": "none", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "*"}


def check(name: str, package: str, work: Callable[[], object]) -> None:
    try:
        work()
        result = "ok"
    except Exception as error:  # whatever a client raises is the finding
        result = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    print(f"{name}\t{version(package)}\t{result}", flush=True)


def agents_sdk(responses: bool) -> None:
    import agents
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=BASE, api_key="none", max_retries=0)
    kind = agents.OpenAIResponsesModel if responses else agents.OpenAIChatCompletionsModel

    @agents.function_tool
    def weather(city: str) -> str:
        """Tells the weather."""
        return f"sunny in {city}"

    settings = agents.ModelSettings(max_tokens=64)
    agent = agents.Agent(
        name="a",
        instructions="Be brief.",
        model=kind(MODEL, client),
        tools=[weather],
        model_settings=settings,
    )

    async def talk() -> None:
        first = await agents.Runner.run(agent, ASK, max_turns=2)
        more: Any = [*first.to_input_list(), {"role": "user", "content": "and again"}]
        streamed = agents.Runner.run_streamed(agent, more, max_turns=2)
        async for _ in streamed.stream_events():
            pass

    asyncio.run(talk())


def litellm_of(model: str, base: str) -> None:
    import litellm

    fields: Any = {"model": model, "api_base": base, "api_key": "none", "max_tokens": 32}
    messages = [{"role": "user", "content": ASK}]
    whole = litellm.completion(messages=messages, num_retries=0, **fields)
    assert whole.usage.total_tokens > 0
    chunks = list(litellm.completion(messages=messages, stream=True, num_retries=0, **fields))
    assert chunks


def instructor_chat() -> None:
    import instructor
    from openai import OpenAI
    from pydantic import BaseModel

    class City(BaseModel):
        name: str

    raw = OpenAI(base_url=BASE, api_key="none", max_retries=0)
    client = instructor.from_openai(raw, mode=instructor.Mode.TOOLS)
    said = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Name a city."}],
        response_model=City,
        max_retries=0,
        max_tokens=200,
    )
    assert isinstance(said.name, str)


def pydantic_ai(responses: bool) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=BASE, api_key="none")
    kind = OpenAIResponsesModel if responses else OpenAIChatModel
    agent = Agent(kind(MODEL, provider=provider), model_settings={"max_tokens": 64})
    first = agent.run_sync(ASK)
    second = agent.run_sync("and again", message_history=first.all_messages())
    assert second.usage().input_tokens > 0 if callable(second.usage) else second.usage.input_tokens


def langchain_chat(responses: bool) -> None:
    from langchain_openai import ChatOpenAI

    chat: Any = ChatOpenAI(
        base_url=BASE,
        api_key="none",
        model=MODEL,
        max_tokens=32,
        max_retries=0,
        use_responses_api=responses,
        stream_usage=True,
    )
    assert chat.invoke(ASK).usage_metadata["input_tokens"] > 0
    assert list(chat.stream(ASK))


def langchain_anthropic() -> None:
    from langchain_anthropic import ChatAnthropic

    chat: Any = ChatAnthropic(base_url=URL, api_key="none", model=MODEL, max_tokens=32)
    assert chat.invoke(ASK).usage_metadata["input_tokens"] > 0
    assert list(chat.stream(ASK))


def main() -> None:
    check("OpenAI Agents SDK, chat", "openai-agents", lambda: agents_sdk(False))
    check("OpenAI Agents SDK, responses", "openai-agents", lambda: agents_sdk(True))
    check("LiteLLM, openai", "litellm", lambda: litellm_of(f"openai/{MODEL}", BASE))
    check("LiteLLM, anthropic", "litellm", lambda: litellm_of(f"anthropic/{MODEL}", URL))
    check("instructor, tools", "instructor", instructor_chat)
    check("pydantic-ai, chat", "pydantic-ai-slim", lambda: pydantic_ai(False))
    check("pydantic-ai, responses", "pydantic-ai-slim", lambda: pydantic_ai(True))
    check("LangChain, chat", "langchain-openai", lambda: langchain_chat(False))
    check("LangChain, responses", "langchain-openai", lambda: langchain_chat(True))
    check("LangChain, Anthropic", "langchain-anthropic", langchain_anthropic)


if __name__ == "__main__":
    main()
