"""The web page as browsers get it: without a key, held to this host, kept by its ETag."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from kvcommons.pb import decode_pb2, ledger_pb2
from services.router.page.page import page_files
from tests.contract.rest_stack import KvStore, Stack, stack
from tests.waiting import eventually

pytest_plugins = ("tests.contract.rest_fixtures",)

PATHS = sorted(page_files())


async def test_every_file_comes_with_its_type_and_its_policy(served: Stack) -> None:
    for path in PATHS:
        async with served.http.get(path) as got, served.http.head(path) as head:
            assert got.status == head.status == 200, path
            assert await got.read() == page_files()[path].body
            assert await head.read() == b""
            assert head.content_length == int(got.headers["Content-Length"])
            suffix = path.rpartition(".")[2] if path != "/" else "html"
            kinds = {"html": "html", "css": "css", "js": "javascript", "svg": "svg+xml"}
            assert got.content_type.partition("/")[2] == kinds[suffix]
            assert got.headers["X-Content-Type-Options"] == "nosniff"
            assert got.headers["Referrer-Policy"] == "no-referrer"
            policy = got.headers["Content-Security-Policy"].split("; ")
            assert {"default-src 'none'", "frame-ancestors 'none'", "script-src 'self'"} <= set(policy)
            assert {"connect-src 'self'", "img-src 'self'", "style-src 'self'", "base-uri 'none'"} <= set(
                policy
            )
            assert "unsafe" not in got.headers["Content-Security-Policy"]


async def test_what_a_browser_has_is_not_sent_again(served: Stack) -> None:
    for encoding in ("gzip", "identity"):
        accepts = {"Accept-Encoding": encoding}
        async with served.http.get("/page/js/main.js", headers=accepts) as first:
            tag = first.headers["ETag"]
            assert first.headers["Cache-Control"] == "no-cache"
            assert first.headers.get("Content-Encoding", "identity") == encoding
            assert "Accept-Encoding" in first.headers["Vary"]
        async with served.http.get("/page/js/main.js", headers={**accepts, "If-None-Match": tag}) as again:
            assert (again.status, await again.read()) == (304, b"")
            assert again.headers["ETag"] == tag
        async with served.http.get(
            "/page/js/main.js", headers={**accepts, "If-None-Match": '"old"'}
        ) as other:
            assert other.status == 200


@pytest.mark.parametrize(
    "path", ["/page", "/page/", "/page/nothing.js", "/page/vendor/README.md", "/page/../page.py"]
)
async def test_nothing_else_is_there(served: Stack, path: str) -> None:
    status, body = await served.get(path)
    assert (status, body["error"]["code"]) == (404, "not_found")


async def test_the_page_takes_nothing(served: Stack) -> None:
    status, body = await served.post("/", {})
    assert (status, body["error"]["code"]) == (405, "method_not_allowed")


async def test_the_page_needs_no_key_and_all_else_does(socket_folder: Path, rest_store: KvStore) -> None:
    keys, secret = socket_folder / "keys", socket_folder / "secret"
    keys.write_text("ann key-of-ann-1\n")
    secret.write_bytes(b"s" * 32)
    settings = {"api_keys": str(keys), "secret_file": str(secret)}
    async with stack(socket_folder, rest_store, settings=settings) as served:
        for path in PATHS:
            async with served.http.get(path) as answered:
                assert answered.status == 200, path
        for path in ("/page/nothing.js", "/v1/sessions", "/v1/status", "/metrics"):
            async with served.http.get(path) as refused:
                assert refused.status == 401, path


async def test_a_setting_turns_it_off(socket_folder: Path, rest_store: KvStore) -> None:
    async with stack(socket_folder, rest_store, settings={"page": False}) as served:
        for path in PATHS:
            async with served.http.get(path) as answered:
                assert answered.status == 404, path
        async with served.http.get("/health") as health:
            assert health.status in (200, 503)


async def test_a_stream_says_who_served_it_and_from_which_tier(served: Stack) -> None:
    """What the page shows under an answer."""
    served.says("hello")
    body = {"messages": [{"role": "user", "content": "hi"}], "stream_options": {"include_usage": True}}
    *_, last, done = await served.stream("/v1/chat/completions", body)
    assert done == "[DONE]"
    timings = last["timings"]
    assert timings["instances"] == {
        "prefill": ["prefill-engine0"],
        "decode": ["decode-engine0"],
        "holders": [],
    }
    assert (timings["dram_tokens"], timings["disk_tokens"]) == (0, 0)


async def test_a_holder_that_joins_in_mid_answer_is_in_the_proof(served: Stack) -> None:
    engines = [one for engine in served.engines for one in engine.instances()]
    pools = [
        ledger_pb2.Instance(
            id=f"pool-{number}",
            service="attention_pool",
            control_address="127.0.0.1:1",
            data_address=f"tcp:pool:{number}",
            load=ledger_pb2.Load(ready=True),
        )
        for number in range(3)
    ]
    await served.ledger.show([*engines, served.store.instance, *pools])
    served.says("one two three four five")
    # A head group goes by its first part; who is not known is not named.
    for at, address in ((1, "tcp:pool:1"), (3, "tcp:pool:0, tcp:pool:2"), (4, "tcp:gone:1")):
        lent = decode_pb2.BorrowedBlocks(data_address=address, blocks=at)
        served.script.borrowed[at] = [lent]
    body = {"messages": [{"role": "user", "content": "hi"}], "stream_options": {"include_usage": True}}

    async def reported() -> bool:
        *_, last, _ = await served.stream("/v1/chat/completions", body)
        holders: list[str] = last["timings"]["instances"]["holders"]
        return holders == ["pool-1", "pool-0"]

    await eventually(reported)


async def test_who_takes_no_gzip_gets_none(served: Stack) -> None:
    async with aiohttp.ClientSession(served.url, skip_auto_headers=("Accept-Encoding",)) as plain:
        async with plain.get("/page/page.css") as got:
            assert "Content-Encoding" not in got.headers
            assert await got.read() == page_files()["/page/page.css"].body
