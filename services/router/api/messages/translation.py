"""What a Messages request asks for, as the chat request that it is served as. Pure."""

from __future__ import annotations

import json
from typing import Any

from kvcommons.errors import InvalidInput
from services.router.api.messages.requests import (
    InputMessage,
    InputTool,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    TokenCountRequest,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    text_of,
)

Json = dict[str, Any]

# Of chat's fields, what they are called here.
FIELDS = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Anthropic's tiers are about paying: here both are the class of service that the key has.
_TIERS = {"standard_only": "auto"}


def chat_body(body: TokenCountRequest) -> Json:
    """The body of a chat request with the same prompt; for a MessagesRequest, with the same answer. Raises
    InvalidInput for a conversation that ends with an answer, which nothing here goes on with."""
    if body.messages[-1].role == "assistant":
        raise InvalidInput(
            "messages ends with an answer of the assistant, and an answer that the client began is not gone "
            "on with here: end with a message of the user",
            param=f"messages[{len(body.messages) - 1}]",
        )
    chat: Json = {"model": body.model, "messages": _messages(body)}
    if body.tools:
        chat["tools"] = [_tool(tool) for tool in body.tools]
        if body.tool_choice is not None:
            chat["tool_choice"] = _choice(body.tool_choice)
            if body.tool_choice.disable_parallel_tool_use:
                chat["parallel_tool_calls"] = False
    if body.output_config is not None and body.output_config.format is not None:
        schema = {"name": "answer", "schema": body.output_config.format.schema_}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessagesRequest):
        chat |= _sampling(body)
    return chat


def _sampling(body: MessagesRequest) -> Json:
    fields: Json = {
        "max_completion_tokens": body.max_tokens,
        "stream": body.stream,
        "stop": body.stop_sequences or None,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "service_tier": _TIERS.get(body.service_tier or "", body.service_tier),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _messages(body: TokenCountRequest) -> list[Json]:
    system = text_of(body.system or "")
    said = [one for message in body.messages for one in _message(message)]
    return [{"role": "system", "content": system}, *said] if system else said


def _message(message: InputMessage) -> list[Json]:
    """A message of blocks is several of chat's where it has results of tools: each is one of its own, before
    what the user says to them."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[Json] = []
    texts: list[TextBlock] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for block in message.content:
        if isinstance(block, ToolResultBlock):
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": block.text})
        elif isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            arguments = json.dumps(block.input, ensure_ascii=False)
            calls.append(
                {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}
            )
    said: Json = {"role": message.role, "content": text_of(texts)}
    if thoughts:
        said["reasoning_content"] = "\n".join(thoughts)
    if calls:
        said["tool_calls"] = calls
    return [*results, said] if texts or calls or not results else results


def _tool(tool: InputTool) -> Json:
    function: Json = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> Json | str:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return _CHOICES[choice.type]
