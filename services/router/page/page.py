"""Serves the web page: the files in `static`, read once, the same for everybody and without a key.

The page loads nothing from other hosts, and its content security policy holds it to that: scripts and styles
are these files alone, no text becomes markup but through the sanitiser, and no other site may frame it. What
it shows comes from the REST API, which asks for a key where keys are configured.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler

_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml; charset=utf-8",
}
_NOT_MODIFIED = 304
_COMPRESS_BYTES_MIN = 1024
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types lit-html dompurify",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-DNS-Prefetch-Control": "off",  # looking up the hosts of links would tell them to others
    "Cache-Control": "no-cache",  # kept, and asked for by its ETag: a new version is there at once
    "Vary": "Accept-Encoding",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFile:
    """`tag` changes with the content; `compressed` is gzip, absent where it would save nothing."""

    content_type: str
    body: bytes
    compressed: bytes | None
    tag: str


def page_files(folder: Path = _FOLDER) -> dict[str, PageFile]:
    """The files by the path at which they are served; licences and notes beside them are not."""
    found = {
        f"/page/{path.relative_to(folder).as_posix()}": _read(path)
        for path in sorted(folder.rglob("*"))
        if path.suffix in _TYPES
    }
    return {"/": found.pop("/page/index.html"), **found}


def page_handlers(files: Mapping[str, PageFile]) -> dict[str, Handler]:
    """What answers GET and HEAD of each path."""
    return {path: _handler(file) for path, file in files.items()}


def _read(path: Path) -> PageFile:
    body = path.read_bytes()
    small = gzip.compress(body, mtime=0) if len(body) >= _COMPRESS_BYTES_MIN else body
    return PageFile(
        content_type=_TYPES[path.suffix],
        body=body,
        compressed=small if len(small) < len(body) else None,
        tag=hashlib.sha256(body).hexdigest()[:16],
    )


def _handler(file: PageFile) -> Handler:
    async def serve(request: web.Request) -> web.Response:
        zipped = file.compressed if "gzip" in request.headers.get("Accept-Encoding", "") else None
        tag = f"{file.tag}-gzip" if zipped is not None else file.tag
        headers = _HEADERS | {"ETag": f'"{tag}"', "Content-Type": file.content_type}
        known = request.if_none_match or ()
        if any(one.value in ("*", tag) for one in known):
            return web.Response(status=_NOT_MODIFIED, headers=headers)
        if zipped is not None:
            headers["Content-Encoding"] = "gzip"
        return web.Response(body=file.body if zipped is None else zipped, headers=headers)

    return serve
