"""What all bodies of requests have in common."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

NotBuilt = dict[str, str]
Elsewhere = dict[str, str]
JsonObject = dict[str, Any]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    # Fields of the API that are not built: a value that would have an effect is refused by name, with this
    # advice.
    NOT_BUILT: ClassVar[NotBuilt] = {}
    # Fields of other APIs, which are unknown here: their error has this advice.
    ELSEWHERE: ClassVar[Elsewhere] = {}
    # Its `messages` are chat's.
    CHAT_MESSAGES: ClassVar[bool] = False

    def check_together(self) -> None:
        """Raises InvalidInput for fields that are each as they should be, and do not go together."""
