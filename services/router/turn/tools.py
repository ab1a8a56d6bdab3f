"""The tools that a request offers its answer. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcommons.errors import InvalidInput
from kvcommons.grammar import sources
from services.router.answer.grammar import HeldCalls
from services.router.api.schemas.requests import ChatRequest
from services.router.api.schemas.tools import FunctionChoice

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOffer:
    """`definitions`: as chat templates read them, JSON values; they are part of the prompt whatever `choice`
    is. `named`: the function that has to be called, where `choice` is "named". `strict`: names of those whose
    arguments keep to their schemas under any choice. `texts`: grammars in Lark's syntax, by the names of
    those whose input is text that keeps to one. `beside_content`: a grammar holds what is no call."""

    definitions: tuple[dict[str, Any], ...] = ()
    choice: str = "auto"  # or "none", "required", "named"
    named: str = ""
    parallel: bool = True
    strict: frozenset[str] = frozenset()
    texts: Mapping[str, str] = field(default_factory=dict)
    beside_content: bool = False

    @property
    def callable_names(self) -> frozenset[str]:
        """Of those that the answer may call."""
        return frozenset(self._callable)

    @property
    def held(self) -> bool:
        """Whether a grammar holds the answer's calls."""
        if self.choice == "auto" and self.definitions:
            return bool(self.strict or self.texts) or not self.parallel or self.beside_content
        return self.forced

    @property
    def forced(self) -> bool:
        """Whether the answer is nothing but calls."""
        return self.choice in ("required", "named")

    @property
    def finish_reason(self) -> str:
        """Of an answer that calls."""
        return "stop" if self.choice == "named" else "tool_calls"

    def held_calls(self) -> HeldCalls | None:
        """Raises InvalidInput for a schema that no grammar is made of."""
        if not self.held:
            return None
        texts: dict[str, str] = {}
        chars = 0
        for name, (param, parameters) in self._callable.items():
            if name in self.texts:
                texts[name] = sources.of_lark(self.texts[name], param=param)
            elif not self.forced and name not in self.strict:
                texts[name] = sources.of_json_object()
                continue
            else:
                texts[name] = _of_arguments(parameters, param)
            chars += len(texts[name])
            if chars > sources.SCHEMA_CHARS_MAX:
                raise InvalidInput(
                    f"tools: the schemas of functions whose calls are held to them have at most "
                    f"{sources.SCHEMA_CHARS_MAX} characters together: send fewer, or name one in tool_choice",
                    param="tools",
                )
        return HeldCalls(
            arguments=texts,
            forced=self.forced,
            parallel=self.parallel and self.choice != "named",
            texts=frozenset(self.texts.keys() & texts.keys()),
        )

    @property
    def _callable(self) -> Mapping[str, tuple[str, Any]]:
        """By name: where its parameters stand, and they."""
        if self.choice == "none":
            return {}
        found = {
            one["function"]["name"]: (
                f"tools[{at}].function.parameters",
                one["function"].get("parameters", {}),
            )
            for at, one in enumerate(self.definitions)
        }
        return {self.named: found[self.named]} if self.choice == "named" else found

    @property
    def record(self) -> str:
        """As a session keeps them; empty for none."""
        return json.dumps(self.definitions, ensure_ascii=False) if self.definitions else ""


NO_TOOLS = ToolOffer()


def kept_tools(record: str, *, choice: str = "auto") -> ToolOffer:
    """Those that a session keeps."""
    return ToolOffer(definitions=tuple(json.loads(record)) if record else (), choice=choice)


def definitions_of(request: ChatRequest) -> tuple[dict[str, Any], ...]:
    """Of its tools, as chat templates read them."""
    return tuple(tool.function.definition() for tool in request.tools or ())


def offered_tools(
    request: ChatRequest, kept: str | None, *, texts: Mapping[str, str] | None = None
) -> ToolOffer:
    """`kept`: what the session keeps; None where there is no session, or it has had no turn. `texts`: as
    `ToolOffer` has them. Raises InvalidInput for other tools than a session's."""
    given = definitions_of(request)
    definitions = given if kept is None else kept_tools(kept).definitions
    if given and given != definitions:
        raise InvalidInput(
            "tools are not those that this session began with, which stand at the head of its prompt: send "
            "the same ones in the same order, or none, or begin another session",
            param="tools",
        )
    asked = request.tool_choice or "auto"
    choice, named = asked if isinstance(asked, str) else "named", ""
    if isinstance(asked, FunctionChoice):
        named = asked.function.name
        if named not in {one["function"]["name"] for one in definitions}:
            raise InvalidInput(
                f"tool_choice names {named!r}, which is none of the tools", param="tool_choice.function.name"
            )
    elif choice == "required" and not definitions:
        raise InvalidInput(
            "tool_choice asks for a call, and there are no tools: send some", param="tool_choice"
        )
    return ToolOffer(
        definitions=definitions,
        choice=choice,
        named=named,
        parallel=request.parallel_tool_calls is not False,
        texts=texts or {},
        beside_content=_holds_content(request),
        strict=frozenset(tool.function.name for tool in request.tools or () if tool.function.strict),
    )


def _holds_content(request: ChatRequest) -> bool:
    form = request.response_format
    return request.structured_outputs is not None or (form is not None and form.type != "text")


def _of_arguments(parameters: dict[str, Any], param: str) -> str:
    """The grammar of arguments that keep to a schema; they are an object whatever it says."""
    if parameters.get("type", "object") != "object":
        raise InvalidInput(f'{param}: arguments are an object: its type is "object"', param=param)
    if parameters in ({}, {"type": "object", "properties": {}}):
        parameters = _NO_ARGUMENTS
    return sources.of_schema({"type": "object", **parameters}, param=param)
