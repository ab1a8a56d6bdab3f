"""The page in a real Chromium before a real router and scripted engines: what a whole stack shows too seldom.

tests/system/test_page_walk.py is a person's walk over a whole stack.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvcommons.errors import InvalidInput
from kvcommons.pb import ledger_pb2 as pb
from services.router.admission.classes import ClassObjectives
from tests.contract.kvstore_process import KvstoreProcess
from tests.contract.rest_stack import KvStore, Stack, stack
from tests.contract.test_hints import Known
from tests.machine import scaled
from tests.system.browser import INSTALL, chromium_beside_a_loop, no_chromium
from tests.unit.kvstore.samples import block_ids

pytestmark = pytest.mark.slow
CHAT = "/v1/chat/completions"
pytest_plugins = ("tests.contract.rest_fixtures",)

SETTLEMENT = pb.Settlement(
    id="7-1",
    term=7,
    step=pb.Settlement.Step.COPY,
    round=2,
    legs=[
        pb.Leg(debtor="decode-a", creditor="decode-b", left_blocks=6, settled_blocks=4),
        pb.Leg(debtor="decode-b", creditor="decode-a", left_blocks=3, settled_blocks=4),
    ],
)
HOSTILE = """Hello <img src="http://elsewhere.test/a.png" onerror="document.title='taken'"> there
<script>document.title = 'taken'</script> <style>body { display: none }</style>
![picture](http://elsewhere.test/b.png) [a link](javascript:document.title='taken') [another](https://elsewhere.test/c)
<svg onload="document.title='taken'"></svg> <iframe src="http://elsewhere.test/d"></iframe>"""


@pytest.fixture(scope="module", autouse=True)
def needs_a_browser() -> None:
    if reason := no_chromium():
        pytest.skip(reason)


@asynccontextmanager
async def tab_at(url: str, complaints: list[str], **options: Any) -> AsyncIterator[Any]:
    """`complaints` takes what the browser says of a violated policy, and requests to other hosts."""
    async with chromium_beside_a_loop() as browser:
        tab = await browser.new_page(**options)
        tab.set_default_timeout(1000 * scaled(20))
        host = url.partition("#")[0]
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("console", lambda line: complaints.append(line.text) if line.type == "error" else None)
        tab.on("request", lambda one: None if one.url.startswith(host) else complaints.append(one.url))
        await tab.goto(url)
        yield tab


async def show_a_circle(served: Stack) -> None:
    """Two that owe each other, and a ledger that settles it."""
    circle = [
        pb.Instance(
            id=name,
            service="decode",
            control_address=served.ledger.address,
            host="here",
            load=pb.Load(total_blocks=64, free_blocks=16, ready=True, loans={other: 9}),
        )
        for name, other in (("decode-a", "decode-b"), ("decode-b", "decode-a"))
    ]
    ledger = pb.Instance(
        id="ledger-0", service="ledger", control_address=served.ledger.address, load=pb.Load(ready=True)
    )
    await served.ledger.show([*circle, served.store.instance, ledger])


async def test_a_settlement_is_seen_as_it_happens(served: Stack, tmp_path: Path) -> None:
    complaints: list[str] = []
    await show_a_circle(served)
    served.ledger.settlements = [pb.SettlementReport(settlement=SETTLEMENT, begun_ms=900)]
    async with tab_at(f"{served.url}/#/commons", complaints) as tab:
        now = tab.locator(".settlement-list .steps [aria-current=step]")
        await now.wait_for()
        assert await now.inner_text() == "copy"
        reported = await tab.locator(".settlement-list").inner_text()
        assert "decode-a → decode-b → decode-a" in reported
        assert "round 2: KV is copied home, 8 blocks came home" in reported
        assert "decode-a from decode-b: 4 home, 6 left" in reported
        assert await tab.locator(".graph .arrow.settling").count() == 2
        pictures = Path(os.environ.get("PAGE_PICTURES", tmp_path))
        for colours in ("dark", "light"):
            await tab.emulate_media(color_scheme=colours)
            await tab.screenshot(path=pictures / f"settlement-{colours}.png", animations="disabled")
        ended = pb.Settlement()
        ended.CopyFrom(SETTLEMENT)
        ended.step = pb.Settlement.Step.END
        served.ledger.settlements = [
            pb.SettlementReport(settlement=ended, begun_ms=3000, ended=True, ended_ms=2000)
        ]
        await tab.locator(".settlement-list .ended").wait_for()
        assert "ended 2 s ago after 2 rounds" in await tab.locator(".settlement-list").inner_text()
        assert await tab.locator(".graph .arrow.settling").count() == 0
    assert complaints == []


async def test_what_is_older_than_the_picture_says_so(served: Stack) -> None:
    """A lender that does not answer, and a service whose heartbeats do not come; and nothing of others."""
    await show_a_circle(served)
    served.ledger.silent_ms = {"decode-a": 65_000, "decode-b": 700, "kvstore-0": 31_000, "ledger-0": 900}
    async with tab_at(f"{served.url}/#/commons", []) as tab:
        lending = tab.locator(".room.lending .problem")
        await lending.first.wait_for()
        reported = await lending.all_inner_texts()
        assert re.match(
            r"decode-a does not answer: its memory and what it lends are as it said \d\d s ago", reported[0]
        )
        assert re.match(r"decode-b does not answer: .* as it said \d s ago", reported[1])
        services = await tab.locator(".room.services li").all_inner_texts()
        aged = [text.split()[0] for text in services if "as it said" in text]
        assert aged == ["decode-a", "kvstore-0"]


async def test_what_a_model_writes_is_shown_and_neither_runs_nor_loads(served: Stack) -> None:
    complaints: list[str] = []
    served.says(HOSTILE)
    async with tab_at(served.url, complaints) as tab:
        await tab.get_by_label("Your message").fill("go")
        await tab.keyboard.press("Enter")
        await tab.locator(".message.assistant .proof").wait_for()
        answer = tab.locator(".message.assistant .prose")
        assert await answer.locator("img, script, style, svg, iframe, object").count() == 0
        assert "onerror" in await answer.inner_text(), "it is shown as text"
        links = await answer.locator("a").evaluate_all(
            "all => all.map(one => [one.href, one.rel, one.target])"
        )
        assert links == [["https://elsewhere.test/c", "noopener noreferrer nofollow", "_blank"]]
        assert "taken" not in await tab.title()
    assert complaints == []


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
ROME, OSLO = (
    f'<tool_call>{{"name": "weather", "arguments": {{"city": "{city}"}}}}</tool_call>'
    for city in ("Rome", "Oslo")
)


async def test_calls_their_results_and_the_tiers_of_a_prompt_are_shown(served: Stack) -> None:
    """A call that the session has, and one that comes while one looks."""
    session, asked = f"s-{uuid.uuid4().hex[:8]}", {"role": "user", "content": "The weather in Rome, please?"}
    served.says(ROME)
    _, reply = await served.post(CHAT, {"messages": [asked], "tools": [WEATHER], "session_id": session})
    (call,) = reply["choices"][0]["message"]["tool_calls"]
    served.says("Sunny.")
    result = {"role": "tool", "tool_call_id": call["id"], "content": "31 degrees"}
    assert (await served.post(CHAT, {"messages": [result], "session_id": session}))[0] == 200
    served.says(OSLO)
    served.script.cached_tokens, served.script.device_tokens = 48, 32
    complaints: list[str] = []
    async with tab_at(f"{served.url}/#/chat/{session}", complaints) as tab:
        await tab.locator(".call summary").click()
        assert await tab.locator(".call").all_inner_texts() == ['Calls weather\n{\n  "city": "Rome"\n}']
        await tab.locator(".message.tool summary").click()
        assert await tab.locator(".message.tool pre").inner_text() == "31 degrees"
        await tab.get_by_label("Your message").fill("And in Oslo?")
        await tab.keyboard.press("Enter")
        answer = tab.locator(".message.assistant").last
        assert "(memory 32)" in await answer.locator(".proof .tiers").inner_text()
        await answer.locator(".call summary").click()
        assert '"city": "Oslo"' in await answer.locator(".call pre").inner_text()
        await answer.locator(".proof summary").click()
        legend = await answer.locator(".bar .legend").first.inner_text()
        assert re.search(r"device memory\s+32 tokens\s+cache\s+16 tokens\s+computed\s+\d+ tokens", legend)
    assert complaints == []


async def test_tiers_the_queue_and_objectives_are_shown(socket_folder: Path) -> None:
    store = KvstoreProcess(socket_folder, socket_folder / "store").wait_ready()
    store.put_blocks(block_ids(3))
    store.wait_written()
    classes = {name: ClassObjectives(ttft_s=ttft_s) for name, ttft_s in (("quick", 3600.0), ("late", 0.001))}
    settings = {"service_classes": classes, "max_running": 1}
    async with stack(socket_folder, Known(store), settings=settings) as served:
        await served.show()
        served.says("one two three")
        hi = {"messages": [{"role": "user", "content": "hi"}]}
        for name in ("quick", "quick", "late"):
            assert (await served.post(CHAT, hi | {"service_tier": name}))[0] == 200
        served.says("word " * 500)
        served.script.delay_s = 0.1
        calls = [asyncio.create_task(served.post(CHAT, hi)) for _ in range(3)]
        async with tab_at(f"{served.url}/#/commons", []) as tab:
            figures = tab.locator(".figures div")
            await figures.filter(has_text=re.compile(r"^\s*waiting in the queue\s*2\s*$")).wait_for()
            rows = [row.split() for row in await tab.locator(".room.objectives tbody tr").all_inner_texts()]
            shown = {row[0]: row[-4:] for row in rows}
            assert (shown["quick"], shown["late"][:2]) == (["2", "0", "0", "0"], ["0", "1"])
            for meter in await tab.locator(".room.tiers .tier").all():
                assert re.match(r"(DRAM|Disk)\s+3 of [1-9][\d,]*$", await meter.inner_text())
                assert await meter.locator("[role=meter]").get_attribute("aria-valuenow") == "3"
            assert await tab.locator(".room.tiers .tier").count() == 2
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    assert store.terminate() == 0, store.errors


async def test_agents_and_lines_that_were_moved_are_told_apart(
    socket_folder: Path, rest_store: KvStore
) -> None:
    complaints: list[str] = []
    session = f"s-{uuid.uuid4().hex[:8]}"
    system = {"role": "system", "content": "Be brief.\nCurrent time: 09:15:17"}
    async with stack(socket_folder, rest_store, settings={"volatile_lines": "move"}) as served:
        await served.show()
        for text, agent in (("plan", {}), ("look", {"thread-id": "explorer"})):
            served.says("seen")
            asked = {"messages": [system, {"role": "user", "content": text}]}
            status, _ = await served.post(CHAT, asked, headers={"session-id": session, **agent})
            assert status == 200
        async with tab_at(f"{served.url}/#/chat/{session}~@explorer", complaints) as tab:
            await tab.get_by_text("look", exact=True).wait_for()
            await tab.locator(f'a[title="{session}"]').click()
            await tab.get_by_text("plan", exact=True).wait_for()
            await tab.wait_for_load_state("networkidle")
            assert await tab.locator(".versions").count() == 0, "what an agent is asked is no version"
            await tab.get_by_role("link", name="explorer").click()
            await tab.get_by_text("Lines moved from the head").wait_for()
            listed = await tab.get_by_role("link", name="explorer").inner_text()
            assert "agent of" in listed
            served.says("again seen")
            await tab.get_by_role("button", name="Regenerate").last.click()
            await tab.get_by_text("again seen", exact=True).wait_for()
        _, branch = await served.get(f"/v1/sessions/{session}~@explorer~2")
        said = [(one["role"], one["content"]) for one in branch["messages"]]
        assert ("user", "look") in said
        assert said[-1] == ("assistant", "again seen")
    assert complaints == []


async def test_a_key_is_asked_for_kept_in_the_tab_and_enough_for_its_role(
    socket_folder: Path, rest_store: KvStore
) -> None:
    keys, secret = socket_folder / "keys", socket_folder / "secret"
    keys.write_text("ann key-of-ann-1\nops key-of-ops-1 operator\n")
    secret.write_bytes(b"s" * 32)
    settings = {"api_keys": str(keys), "secret_file": str(secret)}
    async with stack(socket_folder, rest_store, settings=settings) as served:
        await served.show(headers={"Authorization": "Bearer key-of-ops-1"})
        async with tab_at(f"{served.url}/#/commons", []) as tab:
            field = tab.get_by_label("API key")
            for key, shown in (
                ("nonsense-key", "The server does not know this key."),
                ("key-of-ann-1", "needs an operator's key"),
            ):
                await tab.locator("dialog #key-field:focus").wait_for()  # it is there for whoever types
                await tab.keyboard.type(key)
                await tab.keyboard.press("Enter")
                await tab.get_by_text(shown).wait_for()
                assert await violations(tab) == []
            assert await tab.evaluate("Object.values(localStorage).join()") == ""
            await tab.evaluate("sessionStorage.clear()")
            await tab.reload()
            await field.fill("key-of-ops-1")
            await tab.keyboard.press("Enter")
            await tab.get_by_text("Who lends to whom").wait_for()
            kept = await tab.evaluate("Object.values(sessionStorage)")
            assert "key-of-ops-1" in kept
            # Taken back, it shows nothing new, and another one is asked for.
            keys.write_text("ann key-of-ann-1\n")
            await field.wait_for()


async def violations(tab: Any) -> list[Any]:
    """What axe finds on the page as it is now."""
    pytest.importorskip("axe_playwright_python", reason=f"axe-playwright-python {INSTALL}")
    axe = importlib.import_module("axe_playwright_python.async_playwright").Axe()
    found = (await axe.run(tab)).response["violations"]
    return [(one["id"], [node["html"] for node in one["nodes"]][:3]) for one in found]


# The name of what has the focus, as a screen reader says it.
FOCUSED = """(one => (one.ariaLabel ?? one.labels?.[0]?.textContent ?? one.textContent).trim())
    (document.activeElement)"""


async def press_at(tab: Any, name: str, key: str = "Enter", back: bool = False) -> None:
    """Goes by Tab to what has this name, and presses the key there."""
    for _ in range(60):
        await tab.keyboard.press("Shift+Tab" if back else "Tab")
        if await tab.evaluate(FOCUSED) == name:
            await tab.keyboard.press(key)
            return
    raise AssertionError(f"{name!r} is not reached by Tab")


async def test_a_conversation_is_edited_branched_and_deleted_by_keys_alone(served: Stack) -> None:
    """And at each step nothing is found that those who see or hear little would miss."""
    complaints: list[str] = []
    served.says("hello there")
    async with tab_at(served.url, complaints) as tab:
        tab.on("dialog", lambda dialog: dialog.accept())
        said, proofs = tab.locator(".chat [role=status]"), tab.locator(".message.assistant .proof")
        await press_at(tab, "Your message", key="End")
        await tab.keyboard.type("first question")
        await tab.keyboard.press("Enter")
        await proofs.wait_for()
        assert await said.text_content() == "The model said: hello there"
        session = tab.url.rpartition("/")[2]
        await press_at(tab, "Edit", back=True)
        await tab.locator("#edit:focus").wait_for()
        assert await violations(tab) == []
        await tab.keyboard.press("Escape")
        await tab.locator("#edit").wait_for(state="detached")
        await press_at(tab, "Edit")
        await tab.locator("#edit:focus").wait_for()
        await tab.keyboard.type(", edited")
        await tab.keyboard.press("Enter")
        await tab.wait_for_url(f"**/{session}~2")
        await tab.get_by_text("first question, edited", exact=True).wait_for()
        await tab.get_by_text("2/2", exact=True).wait_for()
        assert await violations(tab) == []
        await press_at(tab, "The branch before", back=True)
        await tab.wait_for_url(f"**/{session}")
        await tab.get_by_text("1/2", exact=True).wait_for()
        served.says("another one")
        await press_at(tab, "Regenerate")
        await tab.wait_for_url(f"**/{session}~3")
        await tab.get_by_text("another one", exact=True).wait_for()
        served.script.reserve_error, served.script.reserve_errors = InvalidInput("no such thing"), 1
        await press_at(tab, "Your message", key="End")
        await tab.keyboard.type("and now?")
        await tab.keyboard.press("Enter")
        await tab.locator(".message.assistant .problem").wait_for()
        assert "no such thing" in str(await said.text_content())
        for colours in ("dark", "light"):
            await tab.emulate_media(color_scheme=colours)
            assert await violations(tab) == []
        await tab.reload()
        await tab.locator("nav.sessions li").nth(2).wait_for()
        title = await tab.locator(f'nav.sessions a[title="{session}~3"] + button').get_attribute("aria-label")
        await press_at(tab, str(title))
        await tab.locator(f'nav.sessions a[title="{session}~3"]').wait_for(state="detached")
    assert [one for one in complaints if "400" not in one] == []
    assert (await served.get(f"/v1/sessions/{session}~3"))[0] == 404


async def test_on_a_phone_the_sessions_are_in_a_drawer(served: Stack) -> None:
    session = f"s-{uuid.uuid4().hex[:8]}"
    served.says("hello there")
    await served.post(CHAT, {"messages": [{"role": "user", "content": "hi"}], "session_id": session})
    complaints: list[str] = []
    async with tab_at(served.url, complaints, viewport={"width": 390, "height": 844}) as tab:
        link, menu = tab.locator(f'a[title="{session}"]'), tab.get_by_role("button", name="Sessions")
        await link.wait_for(state="attached")
        assert not await link.is_visible()
        await menu.click()
        await link.wait_for()
        assert await menu.get_attribute("aria-expanded") == "true"
        await tab.wait_for_timeout(300)  # it slides in
        assert await violations(tab) == []
        assert await tab.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        await tab.keyboard.press("Escape")
        await link.wait_for(state="hidden")
        await tab.locator("#menu:focus").wait_for()
        await tab.keyboard.press("Enter")
        await link.click()
        await link.wait_for(state="hidden")
        await tab.get_by_text("hello there", exact=True).wait_for()
    assert complaints == []


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("view", ["#/commons", ""])
async def test_nothing_is_found_that_those_who_see_or_hear_little_would_miss(
    served: Stack, colours: str, view: str
) -> None:
    served.says("A **word**, `code` and a list:\n\n- one\n- two\n")
    complaints: list[str] = []
    async with tab_at(f"{served.url}/{view}", complaints, color_scheme=colours) as tab:
        if view:
            await show_a_circle(served)
            served.ledger.settlements = [pb.SettlementReport(settlement=SETTLEMENT, begun_ms=900)]
            await tab.locator(".settlement-list").wait_for()
        else:
            await tab.get_by_label("Your message").fill("go")
            await tab.keyboard.press("Enter")
            await tab.locator(".message.assistant .proof summary").click()
        assert await violations(tab) == []
