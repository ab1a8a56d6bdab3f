"""The file of keys: its lines, and what becomes of it while the router runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvcommons.errors import InvalidInput
from services.router.http.keys import Grant, Keys, follow_keys, parse_keys, read_keys
from tests.machine import scaled

LOOK_S = 0.01


def test_the_lines() -> None:
    text = "# comment\n\nann key-of-ann\n  bob   key-of-bob\nops key-of-ops  operator\n"
    assert parse_keys(text, "keys") == {
        "key-of-ann": Grant(tenant="ann"),
        "key-of-bob": Grant(tenant="bob"),
        "key-of-ops": Grant(tenant="ops", operator=True),
    }


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("ann", "line 1"),
        ("ann short", "8 characters"),
        ("an/n key-of-ann", "name"),
        ("ann key-of-ann\nbob key-of-ann", "line 2"),
        ("ann key-of-ann\nann key-of-ann operator", "line 2"),  # which of the two would be meant?
        ("ann key-of-ann admin", "operator"),
        ("ann key-of-ann operator operator", "line 1"),
        ("# nothing", "no keys"),
    ],
)
def test_what_is_no_file_of_keys_is_named_and_no_key_repeated(bad: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says) as refused:
        parse_keys(bad, "keys")
    assert "key-of" not in refused.value.message


async def test_changes_are_followed_and_mistakes_change_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, reported = tmp_path / "keys", asyncio.Queue[Keys]()
    file.write_text("ann key-of-ann\n")
    first = read_keys(file)
    following = asyncio.create_task(follow_keys(str(file), first, reported.put_nowait, look_s=LOOK_S))
    for text in ("ann key-of-ann\nbob key-of-bob\n", "bob key-of-bob operator\n"):
        file.write_text(text)
        assert await asyncio.wait_for(reported.get(), scaled(5)) == parse_keys(text, "keys")
    file.write_text("nonsense\n")
    await _logged(caplog, "expected 'tenant key'")
    file.unlink()
    await _logged(caplog, "cannot be read")
    replaced = tmp_path / "new"
    replaced.write_text("eve key-of-eve\n")
    replaced.rename(file)  # as editors and secrets of containers do
    assert list(await asyncio.wait_for(reported.get(), scaled(5))) == ["key-of-eve"]
    assert reported.empty()
    assert caplog.text.count("the keys stay as they were") == 2
    assert "key-of" not in caplog.text
    following.cancel()


async def _logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    async with asyncio.timeout(scaled(5)):
        while text not in caplog.text:
            await asyncio.sleep(LOOK_S)
