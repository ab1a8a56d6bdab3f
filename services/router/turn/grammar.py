"""The grammar that a request holds its answer to, compiled here before anything is reserved for it."""

from __future__ import annotations

from kvcommons.errors import InvalidInput
from kvcommons.grammar import sources
from kvcommons.grammar.grammars import Grammars
from services.router.answer.formats import AnswerFormat
from services.router.answer.grammar import grammar_of_answer
from services.router.api.schemas.requests import ChatRequest, CompletionRequest
from services.router.turn.tools import ToolOffer


def content_grammar(request: ChatRequest | CompletionRequest) -> tuple[str, str]:
    """Of the answer's content: the grammar's text, and the field that it comes from; both empty without one.
    Pure. Raises InvalidInput for what cannot be asked together, and for a schema that leads out of itself."""
    text, param = "", ""
    form, outputs = request.response_format, request.structured_outputs
    if form is not None and form.json_schema is not None:
        param = "response_format.json_schema.schema"
        text = sources.of_schema(form.json_schema.schema_, param=param)
    elif form is not None and form.type == "json_object":
        text, param = sources.of_json_object(), "response_format"
    if outputs is None:
        pass
    elif text:
        raise InvalidInput(
            "response_format and structured_outputs both say what the answer is: send one of them",
            param="structured_outputs",
        )
    elif outputs.json_ is not None:
        param = "structured_outputs.json"
        text = sources.of_schema(outputs.json_, param=param)
    elif outputs.regex is not None:
        param = "structured_outputs.regex"
        text = sources.of_regex(outputs.regex, param=param)
    elif outputs.choice is not None:
        param = "structured_outputs.choice"
        text = sources.of_choices(outputs.choice, param=param)
    elif outputs.grammar is not None:
        param = "structured_outputs.grammar"
        text = sources.of_lark(outputs.grammar, param=param)
    return text, param


def chat_grammar(request: ChatRequest, form: AnswerFormat, tools: ToolOffer) -> tuple[str, str]:
    """As `content_grammar`, of the whole answer: with its thinking, and calls of tools. Pure."""
    content, param = content_grammar(request)
    calls = tools.held_calls()
    return grammar_of_answer(form, content=content, calls=calls), "tools" if calls is not None else param


async def compiled_grammar(
    grammar: tuple[str, str], request: ChatRequest | CompletionRequest, tenant: str, grammars: Grammars
) -> str:
    """The text of a grammar, compiled. Raises InvalidInput, with the field that it comes from, for what is no
    grammar, and for what cannot be asked beside one."""
    text, param = grammar
    if not text:
        return text
    _check_beside(request)
    try:
        await grammars.ready(tenant, text)
    except InvalidInput as error:
        raise InvalidInput(f"{param}: {error.message}", param=param) from None
    return text


def _check_beside(request: ChatRequest | CompletionRequest) -> None:
    """Of a request whose answer keeps to a grammar."""
    if request.stop:
        raise InvalidInput(
            "stop strings could cut an answer that keeps to a grammar: leave stop out", param="stop"
        )
    if request.min_tokens:
        raise InvalidInput(
            "an answer that keeps to a grammar ends where the grammar does: leave min_tokens out",
            param="min_tokens",
        )
    if request.ignore_eos:
        raise InvalidInput(
            "an answer that keeps to a grammar ends where the grammar does: leave ignore_eos out",
            param="ignore_eos",
        )
