"""A hub id instead of a folder: downloaded from a server on this machine that speaks the hub's protocol."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "demo" / "model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OFFERED = {
    **{path.name: path.read_bytes() for path in DEMO.iterdir() if path.is_file()},
    "pytorch_model.bin": b"a pickle, which nobody asked for",
    "modeling_demo.py": b"raise SystemExit('code of a folder was run')",
    "onnx/model.safetensors": b"the same weights in another form",
}


@dataclass
class Hub:
    """Serves `me/demo`, and remembers which of its files were fetched."""

    fetched: list[str] = field(default_factory=list)
    url: str = ""

    def files(self) -> list[dict[str, object]]:
        return [{"rfilename": name} for name in OFFERED]

    def tree(self) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in OFFERED.items()
        ]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/me/demo/tree/"):
            self._json(self.hub.tree(), body=body)
        elif path.startswith("/api/models/me/demo"):
            self._json({"id": "me/demo", "sha": COMMIT, "siblings": self.hub.files()}, body=body)
        elif path.startswith(f"/me/demo/resolve/{COMMIT}/"):
            self._file(path.removeprefix(f"/me/demo/resolve/{COMMIT}/"), body=body)
        elif path.startswith("/api/models/me/gated"):
            self.send_response(403)
            self.send_header("X-Error-Code", "GatedRepo")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif path.startswith("/api/models/me/broken"):
            self.send_response(500)
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _json(self, value: object, *, body: bool) -> None:
        self._send(json.dumps(value).encode(), {"Content-Type": "application/json"}, body=body)

    def _file(self, name: str, *, body: bool) -> None:
        data = OFFERED[name]
        if body:
            self.hub.fetched.append(name)
        etag = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        self._send(data, etag, body=body)

    def _send(self, data: bytes, headers: dict[str, str], *, body: bool) -> None:
        self.send_response(200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        """Silent."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield hub
    server.shutdown()
    server.server_close()
    thread.join()


def resolve(name: str, hub: Hub, cache: Path, *, offline: bool = False) -> subprocess.CompletedProcess[str]:
    """`resolve_folder` in a process of its own: where the hub is, is read when its client is imported."""
    code = (
        "import sys\n"
        "from kvcommons.errors import ModelNotFound\n"
        "from kvcommons.model.folder import resolve_folder\n"
        "try:\n    print(resolve_folder(sys.argv[1]))\n"
        "except ModelNotFound as error:\n    sys.exit(error.message)\n"
    )
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(cache),
        "HF_HUB_OFFLINE": str(int(offline)),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    return subprocess.run(
        [sys.executable, "-c", code, name],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_a_hub_id_is_downloaded_once_and_without_pickles_or_code(hub: Hub, tmp_path: Path) -> None:
    first = resolve("me/demo", hub, tmp_path)
    assert first.returncode == 0, first.stderr
    folder = Path(first.stdout.strip())
    assert (folder / "model.safetensors").read_bytes() == (DEMO / "model.safetensors").read_bytes()
    wanted = {name for name in OFFERED if name.endswith((".safetensors", ".json", ".jinja"))}
    assert set(hub.fetched) == {name for name in wanted if "/" not in name}
    hub.fetched.clear()
    assert resolve("me/demo", hub, tmp_path, offline=True).stdout == first.stdout
    assert hub.fetched == []


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("me/other", "has no such model, or a private one: name a folder, or the id"),
        ("me/gated", "gives it only to those who accepted its terms"),
        ("me/broken", "did not give it (Server error '500"),
        ("me/--", "it is no id of the hub's"),
    ],
)
def test_what_the_hub_does_not_give_is_told_in_a_line(name: str, says: str, hub: Hub, tmp_path: Path) -> None:
    _assert_told(resolve(name, hub, tmp_path), name, says)


def test_without_a_network_or_leave_to_use_it_the_hub_is_not_blamed(hub: Hub, tmp_path: Path) -> None:
    _assert_told(
        resolve("me/demo", hub, tmp_path, offline=True), "me/demo", "HF_HUB_OFFLINE keeps from asking"
    )
    nowhere = Hub(url="http://127.0.0.1:9")
    _assert_told(resolve("me/demo", nowhere, tmp_path), "me/demo", "try again with a network")


def _assert_told(ended: subprocess.CompletedProcess[str], name: str, says: str) -> None:
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"{name} is no folder here, and ")
    assert says in line
