"""Folders with small tokenizers and chat templates of the kinds that models come with."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from kvcommons.model.synthetic_tokenizer import CHAT_TEMPLATE, make_tokenizer, write_tokenizer

CHATML = CHAT_TEMPLATE
LLAMA3 = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim"
    " + '<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
# Thinking is kept only after the last question, as in Qwen3.
QWEN3 = """
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == "user" %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set thinking = '' %}
        {%- if '</think>' in content %}
            {%- set thinking =
            content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thinking) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thinking.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') + '<|im_end|>\\n' }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
_CORPUS = ["the cat is called Zuzu", "what is my cat called", "user assistant system", "[INST] hello [/INST]"]


def chatml(folder: Path, template: str = CHATML) -> Path:
    write_tokenizer(folder, make_tokenizer(1200), template)
    return folder


def qwen3(folder: Path) -> Path:
    tokenizer = make_tokenizer(1200)
    thinking = ("<think>", "</think>")
    tokenizer.add_tokens([tokenizers.AddedToken(text, special=False) for text in thinking])
    write_tokenizer(folder, tokenizer, QWEN3)
    return folder


def llama3(folder: Path) -> Path:
    """The template in a file of its own; a BOS by post-processor; two tokens that end an answer."""
    tokenizer = make_tokenizer(1000)
    names = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in names])
    bos = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    bos_entry = {"__type": "AddedToken", "content": "<|begin_of_text|>", "special": True, "normalized": False}
    config = {"bos_token": bos_entry | {"lstrip": False, "rstrip": False}, "eos_token": "<|eot_id|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ends = [tokenizer.token_to_id(text) for text in ("<|eot_id|>", "<|eom_id|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    (folder / "chat_template.jinja").write_text(LLAMA3)
    return folder


def mistral(folder: Path, *, metaspace: bool = False) -> Path:
    """SentencePiece-style: byte fallback, and spaces as ▁ (by normaliser, or by pre-tokeniser)."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=[chr(code) for code in range(33, 127)],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    state = json.loads(tokenizer.to_str())
    for byte in range(256):
        state["model"]["vocab"][f"<0x{byte:02X}>"] = len(state["model"]["vocab"])
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": [{"name": "default", "template": MISTRAL}],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


KINDS = {"chatml": chatml, "qwen3": qwen3, "llama3": llama3, "mistral": mistral}
