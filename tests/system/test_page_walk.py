"""A person's walk over the page, in a real Chromium on a real stack: chat, stop, edit, branch, watch KV move
to a pool and back, and see an answer go on though its decode instance is killed.

PAGE_PICTURES=docs/page makes the pictures of the documentation anew.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.fault.streams import NEVER_ENDS, Victims
from tests.machine import scaled
from tests.system.browser import chromium
from tests.system.conftest import FLOAT32
from tests.system.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WIDE, PHONE = {"width": 1280, "height": 860}, {"width": 390, "height": 844}
# More than an instance of 1,024 tokens has room for.
LONG = "Here is what I saw today: " + ", ".join(f"a bird and {number} boats" for number in range(90))
TRIES = 5  # to hit an instance at work


@dataclass
class Person:
    """Who sits before the browser, with a tab for the chat and one for the commons."""

    browser: Any
    url: str
    pictures: Path
    complaints: list[str] = field(default_factory=list)  # of the browser, a violated policy among them
    endless: dict[str, Any] = field(default_factory=dict)  # what the next requests ask for besides

    def __post_init__(self) -> None:
        self.context = self.browser.new_context(viewport=WIDE, color_scheme="light")
        self.context.set_default_timeout(1000 * scaled(30))
        self.chat, self.commons = self._tab("#/chat"), self._tab("#/commons")
        # The demo model is brief; here it is made to go on.
        self.chat.route("**/v1/chat/completions", self._ask_for_more)

    def _tab(self, view: str) -> Any:
        tab = self.context.new_page()
        tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        tab.on(
            "console",
            lambda line: self.complaints.append(line.text) if line.type in ("error", "warning") else None,
        )
        tab.on("request", lambda request: self._check_host(request.url))
        tab.goto(f"{self.url}/{view}")
        return tab

    def _check_host(self, url: str) -> None:
        if not url.startswith(self.url):
            self.complaints.append(f"a request to {url}")

    def _ask_for_more(self, route: Any) -> None:
        body = json.loads(route.request.post_data)
        route.continue_(post_data=json.dumps(body | self.endless))

    def say(self, text: str) -> None:
        self.chat.get_by_label("Your message").fill(text)
        self.chat.keyboard.press("Enter")

    def answer(self) -> Any:
        """The last one, when it is complete."""
        self.chat.wait_for_selector(".message.assistant:last-child .proof")
        return self.chat.locator(".message.assistant").last

    def until_it_answers(self) -> None:
        """Some words of it are there."""
        self.chat.wait_for_selector(".message.assistant.streaming .prose >> text=/.{20}/")

    def picture(self, tab: Any, name: str) -> None:
        """In both colours, and on a phone."""
        for colours, size, kind in (
            ("dark", WIDE, "dark"),
            ("light", PHONE, "phone"),
            ("light", WIDE, "light"),
        ):
            tab.emulate_media(color_scheme=colours)
            tab.set_viewport_size(size)
            tab.screenshot(path=self.pictures / f"{name}-{kind}.png", animations="disabled")
            wide = tab.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, f"{name} is {wide} pixels too wide at {size['width']}"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    sizes = {"capacity_tokens": 1024}
    tables = {
        **FLOAT32,
        # Nothing is drafted: an answer that goes round in circles would be over before it is stopped.
        "decode": {**FLOAT32["decode"], **sizes, "max_draft_tokens": 0},
        "prefill": {**FLOAT32["prefill"], **sizes},
    }
    with Stack(tmp_path_factory.mktemp("stack"), tables=tables, decode=2, attention_pool=1) as one:
        yield one
    one.assert_gone()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def person(browser: Any, stack: Stack, tmp_path: Path) -> Iterator[Person]:
    pictures = Path(os.environ.get("PAGE_PICTURES", tmp_path))
    pictures.mkdir(parents=True, exist_ok=True)
    one = Person(browser, stack.url, pictures)
    yield one
    one.context.close()
    assert one.complaints == []


def test_a_conversation_is_stopped_edited_and_branched(person: Person) -> None:
    chat = person.chat
    person.say("My cat is called Zuzu.")
    assert "to the first token" in person.answer().locator(".proof summary").inner_text()
    person.say("What is my cat called?")
    chat.wait_for_selector(".message.assistant >> nth=1 >> .proof")
    assert "Zuzu" in person.answer().inner_text()
    proof = person.answer().locator(".proof summary").inner_text()
    found = re.search(r"(\d+) of (\d+) prompt tokens from cache", proof)
    assert found is not None, proof
    assert 0 < int(found[1]) < int(found[2])
    session = chat.url.rpartition("/")[2]

    # Stopped by a key, and gone on from there.
    person.endless = {**NEVER_ENDS, "max_tokens": 600}
    person.say("Tell me a long story.")
    person.until_it_answers()
    chat.keyboard.press("Escape")
    chat.wait_for_selector("text=the session does not have this turn")
    piece = chat.locator(".message.assistant").last.locator(".prose").inner_text()
    person.endless = {}
    person.say("What is my cat called?")
    chat.wait_for_selector(".message.assistant >> nth=3 >> .proof")
    kept = _messages(person, session)
    assert [message["role"] for message in kept] == ["user", "assistant"] * 4
    assert kept[5]["content"].strip().startswith(piece.strip()[:20])

    # An edited question begins a branch; both stay.
    chat.locator(".message.user").nth(1).hover()
    chat.get_by_role("button", name="Edit").nth(1).click()
    chat.get_by_label("Edit your message").fill("What is my name?")
    chat.get_by_role("button", name="Send as a branch").click()
    chat.wait_for_url(f"**/{session}~2")
    chat.wait_for_selector(".message >> nth=4", state="detached")
    chat.wait_for_selector(".message.assistant >> nth=1 >> .proof")
    chat.wait_for_selector("text=2/2")
    chat.locator(".proof summary").last.click()
    assert f"{session}" in chat.locator(".evidence").last.inner_text()
    chat.locator(".scroll").evaluate("box => { box.scrollTop = 0 }")
    person.picture(chat, "chat")
    chat.get_by_role("button", name="The branch before").click()
    chat.wait_for_url(re.compile(f"{session}$"))
    chat.wait_for_selector(".message >> nth=7")

    # Another answer is a branch, too.
    chat.locator(".message.assistant").first.hover()
    chat.get_by_role("button", name="Regenerate").first.click()
    chat.wait_for_url(f"**/{session}~3")
    chat.wait_for_selector(".message >> nth=2", state="detached")
    assert person.answer().is_visible()
    assert _messages(person, f"{session}~3")[0]["content"] == "My cat is called Zuzu."
    branches = person.chat.evaluate(
        "id => fetch(`v1/sessions/${id}/branches`).then(reply => reply.json())", session
    )
    assert [(one["id"], one["cut"]) for one in branches["data"]] == [(f"{session}~2", 2), (f"{session}~3", 0)]


def _messages(person: Person, session: str) -> list[dict[str, Any]]:
    detail = person.chat.evaluate("id => fetch(`v1/sessions/${id}`).then(reply => reply.json())", session)
    found: list[dict[str, Any]] = detail["messages"]
    return found


def test_kv_moves_to_a_pool_and_back_before_ones_eyes(person: Person) -> None:
    commons = person.commons
    commons.wait_for_selector("text=Nobody lends to anybody")
    person.endless = {**NEVER_ENDS, "max_tokens": 900}
    person.say(LONG)
    commons.wait_for_selector(".graph .arrow")
    commons.wait_for_selector(".sequence-list .generating .part.lent")
    commons.wait_for_selector(".graph .node.decode .filled")
    loans = commons.locator(".loans").inner_text()
    assert re.search(r"attention_pool-\S+ lends \d+ blocks? to decode-", loans), loans
    person.picture(commons, "commons")
    person.answer()
    proof = person.answer()
    proof.locator("summary").first.click()
    assert "attention_pool" in proof.locator(".evidence").inner_text()
    commons.wait_for_selector("text=Nobody lends to anybody")
    commons.wait_for_selector("text=None is under way at this router.")
    assert "instances are ready" in commons.locator(".commons [role=status]").inner_text()


def test_an_answer_goes_on_though_its_instance_is_killed(person: Person, stack: Stack) -> None:
    chat = person.chat
    person.endless = {**NEVER_ENDS, "max_tokens": 500}
    for number in range(TRIES):
        victims = Victims(stack, "decode")
        person.say("Tell me of the sea." if number == 0 else "Go on.")
        person.until_it_answers()
        killed = victims.kill_busy()
        chat.wait_for_selector(f".message.assistant >> nth={number} >> .proof")
        if killed:
            break
    assert killed, "none was at work"
    assert "resumed once" in person.answer().locator(".proof summary").inner_text()
    person.answer().locator(".proof summary").click()
    assert ", then decode-" in person.answer().locator(".evidence").inner_text()
    # The one that died is started again, and seen.
    person.commons.wait_for_selector(".graph .node.decode >> nth=1")


def test_all_of_it_is_reached_by_keyboard(person: Person) -> None:
    chat = person.chat
    chat.keyboard.press("Tab")
    assert chat.evaluate("document.activeElement.className") == "skip"
    seen = set()
    for _ in range(40):
        chat.keyboard.press("Tab")
        seen.add(
            chat.evaluate(
                "document.activeElement.textContent.trim().slice(0, 40) || document.activeElement.id"
            )
        )
    assert {"Chat", "Commons", "say"} <= seen
    chat.get_by_role("link", name="Commons", exact=True).focus()
    chat.keyboard.press("Enter")
    chat.wait_for_selector("text=Who lends to whom")
    assert chat.title().startswith("The commons")
