"""Counting by identity what a radix tree of the waiting prompts would say."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.admission.companions import Companions

PROMPTS = st.lists(st.text("ab", max_size=5), max_size=12)


def ids_of(prompt: str) -> list[bytes]:
    """Chained, as identities are: each says all that comes before it."""
    return [prompt[: end + 1].encode() for end in range(len(prompt))]


@settings(max_examples=200, deadline=None)
@given(
    prompts=PROMPTS, gone=st.lists(st.integers(0, 11), max_size=6, unique=True), own=st.text("ab", max_size=5)
)
def test_it_counts_those_that_begin_alike(prompts: list[str], gone: list[int], own: str) -> None:
    companions = Companions()
    for prompt in prompts:
        companions.join(ids_of(prompt))
    for number in gone:
        if number < len(prompts):
            companions.leave(ids_of(prompts[number]))
    left = [prompt for number, prompt in enumerate(prompts) if number not in gone] + [own]
    companions.join(ids_of(own))
    for on_device in range(len(own)):
        wanted = own[: on_device + 1]
        assert companions.of(ids_of(own), on_device) == sum(prompt.startswith(wanted) for prompt in left)
    assert companions.of(ids_of(own), len(own)) == 1
    for prompt in left:
        companions.leave(ids_of(prompt))
    assert len(companions) == 0
