"""What a template that drops earlier reasoning costs, and ``gateway.keep_reasoning`` saves.

An agent thinks before every call of a tool and sends its thoughts back, as the APIs ask for. When
the next question comes, such a template writes the whole last turn anew, without them. The model is
small and its template made up after Qwen's; conversations are made up, too.

    python -m benchmarks.clients.kept_reasoning
"""

from __future__ import annotations

import argparse
import json
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.clients.roomy_model import roomy_model
from benchmarks.stacks.product_stack import MIB, Stack, prose

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and (loop.index0 > ns.last or preserve_thinking) %}"
    "<think>{{ m.reasoning_content }}</think>\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NUM_QUESTIONS = 8
STEPS_PER_QUESTION = 4
WORDS = 120


def ask(url: str, model: str, messages: list[Any]) -> dict[str, Any]:
    body = {"model": model, "messages": messages, "max_tokens": 1}
    headers = {"content-type": "application/json", "x-session-id": "thinker"}
    asked = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=300) as answer:
        usage: dict[str, Any] = json.load(answer)["usage"]
    return usage


def share(model: Path, keeps: bool) -> dict[str, Any]:
    """Have the conversation; returns the tokens of all prompts and the share that was reused."""
    settings = {
        "gateway": {"keep_reasoning": keeps},
        "engine": {"model": str(model), "hot_bytes": 512 * MIB},
        "store": {"ram_bytes": 128 * MIB, "disk_bytes": 0},
    }
    messages: list[Any] = [{"role": "system", "content": prose("rules", 400)}]
    prompt = cached = 0
    with Stack(settings) as stack:
        for question in range(NUM_QUESTIONS):
            messages.append({"role": "user", "content": prose(f"q{question}", 20)})
            for step in range(STEPS_PER_QUESTION):
                usage = ask(stack.url, model.name, messages)
                prompt += usage["prompt_tokens"]
                cached += usage["prompt_tokens_details"]["cached_tokens"]
                thought = prose(f"t{question}.{step}", WORDS)
                said = {"role": "assistant", "content": "I look.", "reasoning_content": thought}
                found = {"role": "tool", "tool_call_id": f"c{step}", "content": prose(step, 40)}
                messages += [said, found]
    return {"prompt_tokens": prompt, "computed_tokens": prompt - cached, "reused": cached / prompt}


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = roomy_model(Path(folder) / "thinker")
        config = model / "tokenizer_config.json"
        content = {**json.loads(config.read_text()), "chat_template": TEMPLATE}
        config.write_text(json.dumps(content))
        figures = {"dropped": share(model, False), "kept": share(model, True)}
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
