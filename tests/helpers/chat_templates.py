"""Chat templates of model families, written from the formats that their documentation describes."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
)
MACRO = (
    "{% macro turn(message) %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endmacro %}"
    "{% for message in messages %}{{ turn(message) }}{% endfor %}"
)
LLAMA = (
    "{{ bos_token }}{% if not date_string is defined %}{% if strftime_now is defined %}"
    "{% set date_string = strftime_now('%d %b %Y') %}{% else %}{% set date_string = '26 Jul 2024' %}{% endif %}"
    "{% endif %}"
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\nToday Date: ' }}"
    "{{ date_string + '\\n\\n' + system + '<|eot_id|>' }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim }}"
    "{{ '<|eot_id|>' }}{% endfor %}"
)
CLOCKED = "{{ 'Today is ' + strftime_now('%Y-%m-%d') + '\\n' }}" + CHATML
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\\n\\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}"
    "{{ first if loop.first else '' }}{{ message['content'] | trim }}{{ '<end_of_turn>\\n' }}{% endfor %}"
)
MISTRAL = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\\n\\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}{{ bos_token }}"
    "{% for message in rest %}{% if message['role'] == 'user' %}"
    "{{ ' [INST] ' + (system if loop.index0 + 1 >= rest | length - 1 else '') + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
QWEN = (
    "{% set last = namespace(user=0) %}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}{% for message in messages %}"
    "{% set content = message['content'] %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% set thought = '' %}{% if '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}{% if loop.index0 > last.user %}"
    "{{ '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}{% else %}{{ content }}"
    "{% endif %}{% else %}{{ content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for message in messages %}{% set content = message['content'] %}"
    "{% if message['role'] == 'user' %}{{ '<|User|>' + content }}{% elif message['role'] == 'assistant' %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<|Assistant|>' + content + eos_token }}{% else %}{{ content }}{% endif %}{% endfor %}"
)
PHI = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '<|im_sep|>' + message['content'] }}"
    "{{ '<|im_end|>' }}{% endfor %}"
)
CONTROL = (
    "<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "<|User|>", "<|Assistant|>", "[INST]", "[/INST]",
)  # fmt: skip


def chat_tokenizer(folder: Path, template: str | None = None) -> Any:
    """The tokenizer of a tiny model with control tokens, and perhaps a template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(CONTROL)})
    tokenizer.chat_template = template
    return tokenizer


HARMONY = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + message['content'] }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% else %}"
    "{{ '<|start|>' + message['role'] + '<|message|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
)
BETWEEN = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start|>' + message['role'] + '<|message|>' }}"
    "{{ message['content'] }}{% if not loop.last %}"
    "{{ '<|end|>' if message['role'] == 'assistant' else '<|call|>' }}{% endif %}{% endfor %}"
)
ROLES_ONLY = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|User|>' if message['role'] == 'user' else '<|Assistant|>' }}{{ '\\n' + message['content'] }}{% endfor %}"
)
IN_PARTS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
)
OWN_TAGS = (
    "{% set open, close = '<seed:think>', '</seed:think>' %}{% for message in messages %}"
    "{% set content = message['content'] %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' and close in content %}{% if loop.last %}"
    "{{ open + content.split(close)[0].split(open)[-1] + close }}{% endif %}"
    "{{ content.split(close)[-1] }}{% else %}{{ content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
)
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}{% for tool in tools %}{{ tool | tojson + '\\n' }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
)
"""Schemas of functions in a first turn, and calls within turns, as Hermes and Qwen 2.5 write them."""
