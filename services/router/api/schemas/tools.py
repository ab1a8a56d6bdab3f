"""Tools in bodies of requests: what may be called, and what was called."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from services.router.api.schemas.body import Body

TOOLS_MAX = 128
TOOLS_CHARS_MAX = 262_144  # of all together, as JSON
CALLS_MAX = 128  # of one message

FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class Function(Body):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        None, description="A JSON Schema of the arguments; none: there are no arguments."
    )
    strict: bool | None = Field(
        None, description="true: arguments keep to the schema, also where the model chooses whether to call."
    )

    def definition(self) -> dict[str, Any]:
        """As chat templates read it."""
        described = {"description": self.description} if self.description is not None else {}
        parameters = self.parameters if self.parameters is not None else {"type": "object", "properties": {}}
        return {
            "type": "function",
            "function": {"name": self.name, **described, "parameters": parameters},
        }


class FunctionTool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: FunctionName


class FunctionChoice(Body):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | FunctionChoice


class CalledFunction(Body):
    name: FunctionName
    arguments: str = Field(description="JSON.")


class ToolCallBody(Body):
    """A call that an assistant's message asks for."""

    id: str = Field(min_length=1, max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction


ToolCalls = Annotated[list[ToolCallBody], Field(max_length=CALLS_MAX, fail_fast=True)]


def check_tools(tools: list[FunctionTool]) -> list[FunctionTool]:
    """Raises ValueError for two of a name, and for more text than the limit."""
    names = [tool.function.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two functions have the name {name!r}")
    chars = sum(len(json.dumps(tool.function.definition())) for tool in tools)
    if chars > TOOLS_CHARS_MAX:
        raise ValueError(f"the tools have {chars} characters, and {TOOLS_CHARS_MAX} are the limit")
    return tools


Tools = Annotated[
    list[FunctionTool], Field(max_length=TOOLS_MAX, fail_fast=True), AfterValidator(check_tools)
]
