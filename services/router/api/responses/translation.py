"""What a Responses request asks for, as the chat request that it is served as. Pure."""

from __future__ import annotations

import json
from typing import Any

from kvcommons.errors import InvalidInput
from services.router.answer.parser import TEXT_INPUT
from services.router.api.responses.requests import (
    AllowedTools,
    CustomToolCallItem,
    CustomToolCallOutputItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputItem,
    InputTokensRequest,
    MessageItem,
    NamedTool,
    OfferedCustomTool,
    OfferedFunction,
    ReasoningItem,
    ResponsesRequest,
)
from services.router.api.schemas.messages import joined_text

Json = dict[str, Any]

# Of chat's fields, what they are called here.
FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
}
# The one field of a custom tool's arguments, as the model sees it.
CUSTOM_INPUT = TEXT_INPUT
_LOGPROBS = "message.output_text.logprobs"


def chat_body(body: InputTokensRequest) -> Json:
    """The body of a chat request with what is new, without instructions; for a ResponsesRequest, with the
    same answer. Raises InvalidInput."""
    messages = new_messages(body)
    if not messages:
        raise InvalidInput("input is missing: send a text, or a list of items", param="input")
    chat: Json = {"messages": messages}
    if body.model is not None:
        chat["model"] = body.model
    tools = [_tool(tool) for tool in offered_tools(body)]
    if tools:
        chat["tools"] = tools
        chat |= _choice(body)
        if body.parallel_tool_calls is False:
            chat["parallel_tool_calls"] = False
    elif body.tool_choice not in (None, "auto", "none"):
        raise InvalidInput(
            "tool_choice asks for a call, and no tool of the request is one that can be called here",
            param="tool_choice",
        )
    effort = (body.reasoning or {}).get("effort")
    if effort is not None:
        chat["reasoning_effort"] = effort
    if body.truncation is not None:
        chat["truncation"] = body.truncation
    form = body.text.format if body.text is not None else None
    if form is not None and form.type == "json_schema":
        chat["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": form.schema_},
        }
    elif form is not None:
        chat["response_format"] = {"type": form.type}
    if isinstance(body, ResponsesRequest):
        chat |= _sampling(body)
    return chat


def custom_tools(body: InputTokensRequest) -> frozenset[str]:
    """Names of those whose calls are answered as custom ones."""
    return frozenset(tool.name for tool in body.tools or () if isinstance(tool, OfferedCustomTool))


def offered_tools(body: InputTokensRequest) -> list[OfferedFunction | OfferedCustomTool]:
    """Those that the model is told of."""
    tools = [tool for tool in body.tools or () if isinstance(tool, OfferedFunction | OfferedCustomTool)]
    if isinstance(body.tool_choice, AllowedTools):
        allowed = {tool.name for tool in body.tool_choice.tools}
        missing = allowed - {tool.name for tool in tools}
        if missing:
            raise InvalidInput(
                f"tool_choice allows {sorted(missing)[0]!r}, which is none of the tools", param="tool_choice"
            )
        return [tool for tool in tools if tool.name in allowed]
    return tools


def new_messages(body: InputTokensRequest) -> list[Json]:
    """Chat's messages of the input. Items of one answer (reasoning, text, calls) make one message."""
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}]
    messages: list[Json | _Answer] = []
    open_answer: _Answer | None = None
    for item in body.input or ():
        if (message := _message(item)) is not None:
            open_answer = None
            messages.append(message)
        elif _is_of_answer(item):
            if open_answer is None or not open_answer.takes(item):
                open_answer = _Answer()
                messages.append(open_answer)
            open_answer.add(item)
    return [one.message if isinstance(one, _Answer) else one for one in messages]


def _sampling(body: ResponsesRequest) -> Json:
    logprobs = bool(body.top_logprobs) or _LOGPROBS in (body.include or ())
    fields: Json = {
        "max_completion_tokens": body.max_output_tokens,
        "stream": body.stream,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "service_tier": body.service_tier,
        "logprobs": logprobs or None,
        "top_logprobs": body.top_logprobs if logprobs else None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _is_of_answer(item: InputItem) -> bool:
    return isinstance(item, MessageItem | ReasoningItem | FunctionCallItem | CustomToolCallItem)


class _Answer:
    """An assistant's message that grows by items. Its texts are joined at the end: joined at each item they
    would take a time that grows with the square of their number."""

    def __init__(self) -> None:
        self._content = ""
        self._reasoning: list[str] = []
        self._calls: list[Json] = []

    def takes(self, item: InputItem) -> bool:
        """A message has one text."""
        return not (self._content and isinstance(item, MessageItem) and joined_text(item.content))

    def add(self, item: InputItem) -> None:
        match item:
            case MessageItem():
                self._content = joined_text(item.content) or self._content
            case ReasoningItem():
                self._reasoning.append(joined_text(item.content or item.summary or []))
            case FunctionCallItem():
                self._calls.append(_call(item.call_id, item.name, item.arguments))
            case CustomToolCallItem():
                arguments = json.dumps({CUSTOM_INPUT: item.input}, ensure_ascii=False)
                self._calls.append(_call(item.call_id, item.name, arguments))

    @property
    def message(self) -> Json:
        message: Json = {"role": "assistant", "content": self._content}
        if reasoning := "".join(self._reasoning):
            message["reasoning_content"] = reasoning
        if self._calls:
            message["tool_calls"] = self._calls
        return message


def _message(item: InputItem) -> Json | None:
    match item:
        case MessageItem() if item.role != "assistant":
            return {"role": item.role, "content": joined_text(item.content)}
        case FunctionCallOutputItem() | CustomToolCallOutputItem():
            return {"role": "tool", "tool_call_id": item.call_id, "content": joined_text(item.output)}
    return None


def _call(call_id: str, name: str, arguments: str) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool(tool: OfferedFunction | OfferedCustomTool) -> Json:
    function: Json = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if isinstance(tool, OfferedFunction):
        if tool.parameters is not None:
            function["parameters"] = tool.parameters
        if tool.strict is not None:
            function["strict"] = tool.strict
    else:
        function |= _custom(tool)
    return {"type": "function", "function": function}


def _custom(tool: OfferedCustomTool) -> Json:
    """As a function of one text."""
    text: Json = {"type": "string"}
    paragraphs = [tool.description] if tool.description else []
    form = tool.format
    if form is not None and form.syntax == "regex":
        text["pattern"] = f"^({form.definition})$"
    elif form is not None and form.syntax == "lark":
        paragraphs.append(
            f"Its input is text that keeps to this grammar in Lark's syntax:\n{form.definition}"
        )
    custom: Json = {
        "parameters": {
            "type": "object",
            "properties": {CUSTOM_INPUT: text},
            "required": [CUSTOM_INPUT],
            "additionalProperties": False,
        }
    }
    if "pattern" in text:
        custom["strict"] = True
    return custom | ({"description": "\n\n".join(paragraphs)} if paragraphs else {})


def _choice(body: InputTokensRequest) -> Json:
    choice = body.tool_choice
    if choice is None:
        return {}
    if isinstance(choice, NamedTool):
        return {"tool_choice": {"type": "function", "function": {"name": choice.name}}}
    return {"tool_choice": choice.mode if isinstance(choice, AllowedTools) else choice}
