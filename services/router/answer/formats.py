"""How models write what an answer is made of: their thinking, and calls of tools. Found from the chat
template. Pure.

    hermes          <tool_call>{"name": …, "arguments": {…}}</tool_call>, again for each call (Qwen, Hermes)
    llama3          {"name": …, "parameters": {…}}, the whole answer, or behind <|python_tag|>
    mistral         [TOOL_CALLS][{"name": …, "arguments": {…}}, …]
    mistral_named   [TOOL_CALLS]name[ARGS]{…}, again for each call
    generic         as hermes; for models whose template knows no tools, or writes calls otherwise: they are
                    told of tools in the system prompt
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcommons.errors import InvalidInput
from kvcommons.model.chat import ChatTemplate, Thinking
from kvcommons.model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """`opening` stands before a call, or before a list of them, `closing` behind it. `listed`: calls are the
    members of a list. `bare`: an answer that begins with a brace is a call, too, and a `separator` parts it
    from the next. `before_arguments`: parts a name, which stands before the object, from the arguments, which
    are all of it. `id_chars`: how long the ids of calls have to be, 0: as they come. `described`: the
    template knows nothing of all this."""

    name: str
    opening: str
    closing: str = ""
    listed: bool = False
    bare: bool = False
    separator: str = ""
    before_arguments: str = ""
    arguments_key: str = "arguments"
    id_chars: int = 0
    described: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(mark for mark in (self.opening, self.closing, self.before_arguments) if mark)

    def before_text(self, name: str) -> str:
        """What stands before the input of a call whose input is text as it is, and not JSON: behind the mark
        that opens a call or, where there is one, that which stands before arguments. The input ends with the
        answer."""
        if self.before_arguments:
            return "\n"
        line = "\n" if self.closing else ""
        return f'{line}{{"name": {json.dumps(name)}}}\n'


HERMES = CallFormat(name="hermes", opening="<tool_call>", closing="</tool_call>")
LLAMA3 = CallFormat(
    name="llama3", opening="<|python_tag|>", bare=True, separator=";", arguments_key="parameters"
)
MISTRAL = CallFormat(name="mistral", opening="[TOOL_CALLS]", listed=True, id_chars=9)
MISTRAL_NAMED = CallFormat(
    name="mistral_named", opening="[TOOL_CALLS]", before_arguments="[ARGS]", id_chars=9
)


GENERIC = CallFormat(name="generic", opening="<tool_call>", closing="</tool_call>", described=True)
AUTO = "auto"
CALL_FORMATS: Mapping[str, CallFormat] = {
    form.name: form for form in (HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED, GENERIC)
}


def check_tool_format(setting: str) -> None:
    """Raises InvalidInput."""
    if setting != AUTO and setting not in CALL_FORMATS:
        raise InvalidInput(
            f"tool_format {setting!r} is none of {', '.join((AUTO, *CALL_FORMATS))}", param="tool_format"
        )


def call_format(template: ChatTemplate, setting: str = AUTO) -> CallFormat:
    """The one that `setting` names; with "auto" the one in which the template shows earlier calls."""
    if setting != AUTO:
        return CALL_FORMATS[setting]
    if not template.mentions("tools"):
        return GENERIC
    if template.mentions("[TOOL_CALLS]"):
        return MISTRAL_NAMED if template.mentions("[ARGS]") else MISTRAL
    # Some models write arguments as XML behind the same mark.
    if template.mentions("<tool_call>") and not template.mentions("<function="):
        return HERMES
    if template.mentions("<|python_tag|>") or template.mentions("ipython"):
        return LLAMA3
    return GENERIC


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """Of a model's answers. `control_marks`: marks of parts that are control tokens of the model, and so come
    as tokens only; all others are spelled in the text."""

    thinking: Thinking | None = None
    calls: CallFormat | None = None
    control_marks: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, thinking: Thinking | None, calls: CallFormat | None) -> AnswerFormat:
        names = (*(thinking.marks if thinking else ()), *(calls.marks if calls else ()))
        found = {tokenizer.control_id(name): name for name in names}
        return cls(
            thinking=thinking,
            calls=calls,
            control_marks={token: name for token, name in found.items() if token is not None},
        )
