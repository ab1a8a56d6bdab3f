"""instructor, against the server at the address that is the first argument."""

from __future__ import annotations

import sys
from typing import Literal

import instructor
import openai
from instructor.core import InstructorRetryException
from pydantic import BaseModel, ConfigDict, Field

URL, MODEL = sys.argv[1], "kvcommons-demo"
ASKED = [{"role": "user", "content": "My cat is called Zuzu."}]


class Pet(BaseModel):
    """An animal that somebody has."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=12)
    kind: Literal["cat", "dog"]


def main() -> None:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        patched = instructor.from_openai(client, mode=mode)
        pet, completion = patched.chat.completions.create_with_completion(
            model=MODEL, messages=ASKED, response_model=Pet, max_retries=0, temperature=0
        )
        assert isinstance(pet, Pet), pet
        assert completion.usage.completion_tokens > 0
        print(f"{mode.value}: structured", flush=True)
        partial = list(
            patched.chat.completions.create_partial(
                model=MODEL, messages=ASKED, response_model=Pet, max_retries=0, temperature=0
            )
        )
        assert partial[-1].kind in ("cat", "dog"), partial[-1]
        print(f"{mode.value}: stream", flush=True)
        for text in ("My hamster is called Fipsi, and it lives with my sister.", "And a cat it has."):
            pet, completion = patched.chat.completions.create_with_completion(
                model=MODEL,
                messages=[{"role": "user", "content": text}],
                response_model=Pet,
                max_retries=0,
                temperature=0,
                extra_headers={"X-Session-ID": f"instructor-{mode.value}"},
            )
            assert isinstance(pet, Pet), pet
        assert completion.usage.prompt_tokens_details.cached_tokens > 0, completion.usage
        print(f"{mode.value}: session", flush=True)
        cause: BaseException | None = None
        try:
            patched.chat.completions.create(
                model=MODEL, messages=ASKED, response_model=Pet, max_retries=0, max_tokens=100_000
            )
        except InstructorRetryException as refused:  # which has the SDK's own as its cause
            cause = refused
        while cause is not None and not isinstance(cause, openai.BadRequestError):
            cause = cause.__cause__
        assert cause is not None
        print(f"{mode.value}: error", flush=True)


main()
