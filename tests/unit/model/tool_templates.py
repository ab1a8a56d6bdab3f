"""Chat templates that know tools, small, in the formats of the families that `AnswerFormat` tells apart."""

from __future__ import annotations

from pathlib import Path

import tokenizers

from kvcommons.model.synthetic_tokenizer import make_tokenizer, write_tokenizer

# Qwen and Hermes: tools in the system prompt; results as a user's message, neighbours together.
HERMES = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\nAnswer with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls %}
            {%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
# Llama 3: tools in the first question; one call a message; results from "ipython".
LLAMA3 = """
{{- bos_token }}
{%- set ns = namespace(shown=false) %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model calls one tool at a time') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {%- if tools and message.role == 'user' and not ns.shown %}
            {%- set ns.shown = true %}
            {{- 'Answer with JSON for a call of one of these functions, if you need one.\\n' }}
            {%- for tool in tools %}{{- (tool | tojson(indent=4)) + '\\n\\n' }}{%- endfor %}
        {%- endif %}
        {{- message.content | trim }}{{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
# Mistral: tools before the last question; calls and results as control tokens; ids of nine characters; a
# result has to follow a call.
MISTRAL = """
{{- bos_token }}
{%- set ns = namespace(last=-1, open=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and loop.index0 == ns.last %}
            {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('nine characters') }}{%- endif %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
            {{- ', "id": "' + call.id + '"}' + (']' if loop.last else ', ') }}
            {%- set ns.open = ns.open + 1 %}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {%- if not ns.open %}{{- raise_exception('A result follows a call') }}{%- endif %}
        {%- set ns.open = ns.open - 1 %}
        {{- '[TOOL_RESULTS] {"content": ' + (message.content | tojson) }}
        {{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""


def hermes(folder: Path) -> Path:
    """Marks of calls and of thinking are tokens, and not special."""
    tokenizer = make_tokenizer(1200)
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    tokenizer.add_tokens([tokenizers.AddedToken(text, special=False) for text in marks])
    write_tokenizer(folder, tokenizer, HERMES)
    return folder


def llama3(folder: Path) -> Path:
    tokenizer = make_tokenizer(1200)
    names = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in names])
    write_tokenizer(folder, tokenizer, LLAMA3, bos="<|begin_of_text|>", eos="<|eot_id|>")
    return folder


def mistral(folder: Path) -> Path:
    """All marks are control tokens."""
    tokenizer = make_tokenizer(1200)
    names = (
        "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
        "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    )  # fmt: skip
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in names])
    write_tokenizer(folder, tokenizer, MISTRAL, bos="<s>", eos="</s>")
    return folder


KINDS = {"hermes": hermes, "llama3": llama3, "mistral": mistral}
