"""Two turns of a conversation through each Python client; prints a line for each.

A line has, separated by tabs: the name, the version, "ok" or the error, the number of tokens of the
second prompt, and how many of them were reused, as the client itself reports it. ``sdks.py`` runs
it with the Python of the clients' environment.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

URL, MODEL, ASK, MORE = sys.argv[1:5]
BASE = f"{URL}/v1"
TOKENS = 32
os.environ |= {"OPENAI_API_KEY": "none", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "*"}

Reuse = tuple[int, int]  # tokens of the second prompt, and the reused ones among them


def check(name: str, package: str, work: Callable[[], Reuse]) -> None:
    """Run ``work``, and print the line of a client."""
    reuse: tuple[object, object] = ("", "")
    try:
        reuse = work()
        result = "ok"
    except Exception as error:  # any exception of a client is the finding
        result = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    print(name, version(package), result, *reuse, sep="\t", flush=True)


def _turns(answer: str) -> list[Any]:
    return [
        {"role": "user", "content": ASK},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": MORE},
    ]


def _of_chat(usage: Any) -> Reuse:
    return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens


def openai_chat() -> Reuse:
    from openai import OpenAI

    client = OpenAI(base_url=BASE, api_key="none", max_retries=0)
    asked: Any = {"model": MODEL, "max_tokens": TOKENS}
    first = client.chat.completions.create(messages=[{"role": "user", "content": ASK}], **asked)
    turns = _turns(first.choices[0].message.content or "")
    stream = client.chat.completions.create(
        messages=turns, stream=True, stream_options={"include_usage": True}, **asked
    )
    return _of_chat([x.usage for x in stream][-1])


def openai_responses(refers: bool) -> Reuse:
    """Continue by ``previous_response_id``; if ``refers``, by references to the first answer."""
    from openai import OpenAI

    client = OpenAI(base_url=BASE, api_key="none", max_retries=0)
    asked: Any = {"model": MODEL, "max_output_tokens": TOKENS}
    first = client.responses.create(input=ASK, **asked)
    if refers:
        said = [{"type": "item_reference", "id": x.id} for x in first.output]
        turns: Any = [{"role": "user", "content": ASK}, *said, {"role": "user", "content": MORE}]
        second = client.responses.create(input=turns, **asked)
    else:
        second = client.responses.create(input=MORE, previous_response_id=first.id, **asked)
    assert second.usage
    return second.usage.input_tokens, second.usage.input_tokens_details.cached_tokens


def anthropic_messages() -> Reuse:
    from anthropic import Anthropic

    client = Anthropic(base_url=URL, api_key="none", max_retries=0)
    asked: Any = {"model": MODEL, "max_tokens": TOKENS}
    first = client.messages.create(messages=[{"role": "user", "content": ASK}], **asked)
    turns: Any = [{"role": "user", "content": ASK}, {"role": "assistant", "content": first.content}]
    with client.messages.stream(messages=[*turns, {"role": "user", "content": MORE}], **asked) as x:
        usage = x.get_final_message().usage
    read = usage.cache_read_input_tokens or 0
    return usage.input_tokens + read + (usage.cache_creation_input_tokens or 0), read


def agents_sdk(responses: bool) -> Reuse:
    import agents
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=BASE, api_key="none", max_retries=0)
    kind = agents.OpenAIResponsesModel if responses else agents.OpenAIChatCompletionsModel

    @agents.function_tool
    def weather(city: str) -> str:
        """Report the weather."""
        return f"sunny in {city}"

    settings = agents.ModelSettings(max_tokens=64, include_usage=True)
    agent = agents.Agent(
        name="a",
        instructions="Be brief.",
        model=kind(MODEL, client),
        tools=[weather],
        model_settings=settings,
    )

    async def talk() -> Any:
        first = await agents.Runner.run(agent, ASK, max_turns=2)
        more: Any = [*first.to_input_list(), {"role": "user", "content": MORE}]
        streamed = agents.Runner.run_streamed(agent, more, max_turns=2)
        async for _ in streamed.stream_events():
            pass
        return streamed.raw_responses[0].usage

    usage = asyncio.run(talk())
    return usage.input_tokens, usage.input_tokens_details.cached_tokens


def litellm_of(model: str, base: str) -> Reuse:
    import litellm

    asked: Any = {"model": model, "api_base": base, "api_key": "none", "max_tokens": TOKENS}
    asked["num_retries"] = 0
    first = litellm.completion(messages=[{"role": "user", "content": ASK}], **asked)
    turns = _turns(first.choices[0].message.content or "")
    options = {"include_usage": True}
    stream = litellm.completion(messages=turns, stream=True, stream_options=options, **asked)
    return _of_chat([x.usage for x in stream if getattr(x, "usage", None)][-1])


def instructor_chat() -> Reuse:
    import instructor
    from openai import OpenAI
    from pydantic import BaseModel, Field

    class City(BaseModel):
        name: str = Field(max_length=40)  # the sample model often does not end a string

    raw = OpenAI(base_url=BASE, api_key="none", max_retries=0)
    client = instructor.from_openai(raw, mode=instructor.Mode.TOOLS)
    asked: Any = {"model": MODEL, "response_model": City, "max_retries": 0, "max_tokens": 200}
    first = client.chat.completions.create(messages=[{"role": "user", "content": ASK}], **asked)
    assert isinstance(first.name, str)
    create = client.chat.completions.create_with_completion
    _, completion = create(messages=_turns(first.name), **asked)
    return _of_chat(completion.usage)


def pydantic_ai(responses: bool) -> Reuse:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=BASE, api_key="none")
    kind = OpenAIResponsesModel if responses else OpenAIChatModel
    agent = Agent(kind(MODEL, provider=provider), model_settings={"max_tokens": 64})
    first = agent.run_sync(ASK)
    second = agent.run_sync(MORE, message_history=first.all_messages())
    usage: Any = second.usage() if callable(second.usage) else second.usage
    return usage.input_tokens, usage.cache_read_tokens


def langchain_of(chat: Any) -> Reuse:
    first = chat.invoke(ASK)
    pieces = list(chat.stream([("user", ASK), first, ("user", MORE)]))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    usage = whole.usage_metadata
    return usage["input_tokens"], usage["input_token_details"].get("cache_read", 0)


def langchain_chat(responses: bool) -> Reuse:
    from langchain_openai import ChatOpenAI

    fields: Any = {"base_url": BASE, "api_key": "none", "model": MODEL, "max_tokens": TOKENS}
    fields |= {"max_retries": 0, "use_responses_api": responses, "stream_usage": True}
    return langchain_of(ChatOpenAI(**fields))


def langchain_anthropic() -> Reuse:
    from langchain_anthropic import ChatAnthropic

    fields: Any = {"base_url": URL, "api_key": "none", "model": MODEL, "max_tokens": TOKENS}
    return langchain_of(ChatAnthropic(**fields))


def main() -> None:
    check("openai, chat", "openai", openai_chat)
    check("openai, responses by previous_response_id", "openai", lambda: openai_responses(False))
    check("openai, responses by item_reference", "openai", lambda: openai_responses(True))
    check("anthropic, messages", "anthropic", anthropic_messages)
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
