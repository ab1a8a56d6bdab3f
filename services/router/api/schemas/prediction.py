"""What a client expects an answer to be, in the body of its request."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from services.router.api.schemas.body import Body
from services.router.api.schemas.messages import TextPart, joined_text


def _check_text(content: str | list[TextPart]) -> str | list[TextPart]:
    if not joined_text(content):
        raise ValueError("it is empty: send the text that the answer may be, or leave prediction out")
    return content


# What `_check_text` refuses, described.
_TEXT: dict[str, Any] = {"minLength": 1}
_PARTS: dict[str, Any] = {"minItems": 1, "contains": {"properties": {"text": {"minLength": 1}}}}


class Prediction(Body):
    type: Literal["content"]
    content: Annotated[
        Annotated[str, Field(json_schema_extra=_TEXT)]
        | Annotated[list[TextPart], Field(fail_fast=True, json_schema_extra=_PARTS)],
        AfterValidator(_check_text),
    ] = Field(description="The text, or its parts, which are taken as one.")

    @property
    def text(self) -> str:
        return joined_text(self.content)
