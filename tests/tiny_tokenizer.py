"""A byte-level BPE tokenizer of a few hundred tokens, trained in a blink, with a chat template.

It is the real thing (tokenizers, transformers, mlx_lm's wrapper), only small.
"""

from __future__ import annotations

import json
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper, load
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|im_end|>"
SPECIALS = ["<|endoftext|>", "<|im_start|>", END]
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]

PLAIN = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Knows tools (mlx_lm reads it as "json_tools") and refuses two messages of a role in a row.
TOOLS = """{% if tools %}<|im_start|>system
Tools:{% for tool in tools %} {{ tool.function | tojson }}{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}\
{% if not loop.first and m.role == messages[loop.index0 - 1].role %}\
{{ raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ m.role }}
{{ m.content }}{% for tool_call in m.tool_calls or [] %}<tool_call>
{"name": {{ tool_call.function.name | tojson }}, "arguments": \
{{ tool_call.function.arguments | tojson }}}
</tool_call>{# tool_call.name #}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Opens a block of reasoning for the model.
THINKING = PLAIN.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")

_TEXT = """The capital of France is Paris, and the answer is what the user asked for. A system
message says who the assistant is: a helpful one. {"name": "get_weather", "arguments": {"city":
"Paris"}} is a call of a function; its result is text. Hello, how are you today? I am fine, thanks.
"""


def tiny_tokenizer(
    folder: Path, template: str | None = PLAIN, markers: bool = False
) -> TokenizerWrapper:
    """Written to ``folder`` and loaded from there, as a model's would be."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    if markers:
        tokenizer.add_tokens(MARKERS)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": END,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load(folder)
