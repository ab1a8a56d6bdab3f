"""Grammars of the custom tools of a request: what their input keeps to."""

from __future__ import annotations

from collections.abc import Mapping

from kvcommons.errors import InvalidInput
from kvcommons.grammar import sources
from kvcommons.grammar.grammars import Grammars
from services.router.api.responses.requests import InputTokensRequest, OfferedCustomTool


async def checked_texts(body: InputTokensRequest, tenant: str, grammars: Grammars) -> Mapping[str, str]:
    """Those in Lark's syntax, by their tools' names. Each definition is compiled by itself, also of the other
    syntax, so that an error names it and places are those in it. Raises InvalidInput."""
    found: dict[str, str] = {}
    chars = 0
    for at, tool in enumerate(body.tools or ()):
        if not isinstance(tool, OfferedCustomTool) or tool.format is None or tool.format.definition is None:
            continue
        form, definition = tool.format, tool.format.definition
        param = f"tools[{at}].format.definition"
        chars += len(definition)
        if chars > sources.SCHEMA_CHARS_MAX:
            raise InvalidInput(
                f"{param}: the definitions of all tools have at most {sources.SCHEMA_CHARS_MAX} characters "
                "together: send fewer, or shorter ones",
                param=param,
            )
        make = sources.of_lark if form.syntax == "lark" else sources.of_regex
        try:
            await grammars.ready(tenant, make(definition, param=param))
        except InvalidInput as error:
            said = error.message if error.param == param else f"{param}: {error.message}"
            raise InvalidInput(said, param=param) from None
        if form.syntax == "lark":
            found[tool.name] = definition
    return found
