"""What all bodies of requests have in common."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

NotBuilt = dict[str, str]
JsonObject = dict[str, Any]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    # Fields of OpenAI's API that are not built: a value other than one of NOT_BUILT_DEFAULTS is refused by
    # name, with this advice.
    NOT_BUILT: ClassVar[NotBuilt] = {}
    # Its `messages` are chat's.
    CHAT_MESSAGES: ClassVar[bool] = False
