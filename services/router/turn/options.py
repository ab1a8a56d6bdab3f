"""The variables of the chat template that a request sets. Pure."""

from __future__ import annotations

from typing import Any

from kvcommons.errors import InvalidInput
from kvcommons.model.chat import ChatTemplate
from services.router.api.schemas.requests import ChatRequest

_EFFORT = "reasoning_effort"


def template_options(request: ChatRequest, template: ChatTemplate) -> dict[str, Any]:
    """By name. `reasoning_effort` is one where the template reads it. Raises InvalidInput for a name that the
    template does not read, and for one that says what the prompt is made of."""
    options = dict(request.chat_template_kwargs or {})
    for name in options:
        if name not in template.options:
            known = ", ".join(sorted(template.options)) or "none"
            raise InvalidInput(
                f"chat_template_kwargs: the chat template does not read {name[:64]!r}; it reads {known}",
                param="chat_template_kwargs",
            )
    if request.reasoning_effort is not None and _EFFORT in template.options:
        options.setdefault(_EFFORT, request.reasoning_effort)
    return options
