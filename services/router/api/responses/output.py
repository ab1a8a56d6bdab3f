"""A response's output items while the answer's parts come, and the events that tell of them. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum
from typing import Any

from services.router.answer.parts import CallArguments, CallBegun, Content, Part, Reasoning
from services.router.api.responses.translation import CUSTOM_INPUT

Json = dict[str, Any]


class ItemKind(Enum):
    """Of output items; the value is the prefix of their ids."""

    MESSAGE = "msg"
    REASONING = "rs"
    FUNCTION_CALL = "fc"
    CUSTOM_CALL = "ctc"


class Output:
    """`items` are the response's output. Text and reasoning that follow on each other go on in one item; each
    call has its own. Events lack their sequence_number."""

    def __init__(self, id: str, *, custom_tools: frozenset[str]) -> None:
        """`id`: makes the items' ids. Calls of `custom_tools` are answered as custom ones."""
        self.items: list[Json] = []
        self._id = id
        self._custom_tools = custom_tools
        self._kind: ItemKind | None = None  # of the last item, while it goes on
        self._texts: list[str] = []  # of that item
        self._logprobs: list[Json] = []  # of that item

    def add(self, part: Part, logprobs: Sequence[Json] = ()) -> list[Json]:
        """`logprobs`: of the tokens of a text."""
        match part:
            case Content(text):
                return self._text(ItemKind.MESSAGE, text, logprobs)
            case Reasoning(text):
                return self._text(ItemKind.REASONING, text, ())
            case CallBegun():
                return self._call(part)
            case CallArguments(text=text):
                return self._arguments(text)

    def end(self, status: str) -> list[Json]:
        """Of the last item: "completed", or "incomplete" where the answer was cut."""
        if self._kind is None:
            return []
        item, text = self.items[-1], "".join(self._texts)
        kind, self._kind = self._kind, None
        events = self._finished(kind, item, text)
        item["status"] = status
        self._texts, self._logprobs = [], []
        return [*events, self._event("output_item.done", item=dict(item))]

    def _text(self, kind: ItemKind, text: str, logprobs: Sequence[Json]) -> list[Json]:
        events = [] if self._kind is kind else self._open_text(kind)
        self._texts.append(text)
        self._logprobs.extend(logprobs)
        if kind is ItemKind.MESSAGE:
            return [*events, self._content("output_text.delta", delta=text, logprobs=list(logprobs))]
        return [*events, self._content("reasoning_text.delta", delta=text)]

    def _open_text(self, kind: ItemKind) -> list[Json]:
        if kind is ItemKind.MESSAGE:
            added = self._open(kind, {"type": "message", "role": "assistant", "content": []})
        else:
            added = self._open(kind, {"type": "reasoning", "summary": [], "content": []})
        return [*added, self._content("content_part.added", part=_text_part(kind, "", []))]

    def _call(self, part: CallBegun) -> list[Json]:
        fields: Json = {"call_id": part.id, "name": part.name}
        if part.name in self._custom_tools:
            return self._open(ItemKind.CUSTOM_CALL, {"type": "custom_tool_call", **fields, "input": ""})
        return self._open(ItemKind.FUNCTION_CALL, {"type": "function_call", **fields, "arguments": ""})

    def _arguments(self, text: str) -> list[Json]:
        self._texts.append(text)
        if self._kind is ItemKind.CUSTOM_CALL:
            return []  # its text is in JSON until the call is whole
        return [self._of_item("function_call_arguments.delta", delta=text)]

    def _finished(self, kind: ItemKind, item: Json, text: str) -> list[Json]:
        """Fills the last item in."""
        match kind:
            case ItemKind.MESSAGE:
                part = _text_part(kind, text, self._logprobs)
                done = self._content("output_text.done", text=text, logprobs=self._logprobs)
            case ItemKind.REASONING:
                part = _text_part(kind, text, [])
                done = self._content("reasoning_text.done", text=text)
            case ItemKind.FUNCTION_CALL:
                item["arguments"] = text
                return [self._of_item("function_call_arguments.done", arguments=text)]
            case ItemKind.CUSTOM_CALL:
                item["input"] = given = custom_input(text)
                return [
                    self._of_item("custom_tool_call_input.delta", delta=given),
                    self._of_item("custom_tool_call_input.done", input=given),
                ]
        item["content"] = [part]
        return [done, self._content("content_part.done", part=part)]

    def _open(self, kind: ItemKind, fields: Json) -> list[Json]:
        ended = self.end("completed")
        self._kind = kind
        item = {"id": f"{kind.value}_{self._id}{len(self.items):x}", **fields, "status": "in_progress"}
        self.items.append(item)
        return [*ended, self._event("output_item.added", item=dict(item))]

    def _content(self, name: str, **fields: Any) -> Json:
        return self._of_item(name, content_index=0, **fields)

    def _of_item(self, name: str, **fields: Any) -> Json:
        return self._event(name, item_id=self.items[-1]["id"], **fields)

    def _event(self, name: str, **fields: Any) -> Json:
        return {"type": f"response.{name}", "output_index": len(self.items) - 1, **fields}


def custom_input(arguments: str) -> str:
    """The text of a custom tool's call, from its arguments. Of a call that was cut: what came of them."""
    try:
        given = json.loads(arguments)
    except ValueError:
        return arguments
    text = given.get(CUSTOM_INPUT) if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments


def _text_part(kind: ItemKind, text: str, logprobs: list[Json]) -> Json:
    if kind is ItemKind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
