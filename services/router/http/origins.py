"""Where a request may come from when no key is asked for: host names, and pages in a browser. Pure.

Without keys, whoever reaches the server may use it, and a browser on the same machine reaches it for any page
that it shows. Two attacks follow, and each has its check here:

- A page of another site sends a request (CSRF). A browser says which site a page is of, in `Origin` and in
  `Sec-Fetch-Site`, which a page cannot write.
- A page's own name is made to mean 127.0.0.1 (DNS rebinding). Then the request is of the same origin, but
  `Host` has that name.

Programs that are no browser send neither of the first two headers, and as `Host` what they were told to call.
With keys neither matters: a page has no key.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from kvcommons.errors import PermissionDenied

ANY = "*"
_OWN_SITES = frozenset({"same-origin", "none"})  # none: typed into the address bar, or a bookmark
_SHOWN_CHARS_MAX = 80


class Origins:
    def __init__(self, allowed: Collection[str], hosts: Collection[str], *, keyed: bool) -> None:
        """`allowed`: origins of pages that may call from a browser, `*` for all; `hosts`: names besides those
        of loopback under which clients call this server; `keyed`: each request has to have a key."""
        self._allowed = frozenset(allowed)
        self._hosts = frozenset(host.lower() for host in hosts)
        self._keyed = keyed

    def allows(self, origin: str) -> bool:
        """Whether the operator lets pages of this origin call."""
        return ANY in self._allowed or origin in self._allowed

    def check_host(self, host: str) -> None:
        """`host`: the header's value. Raises PermissionDenied for a name that is not this server's."""
        if self._keyed or ANY in self._hosts:
            return
        name = _name(host)
        if name not in self._hosts and not _is_loopback(name):
            raise PermissionDenied(
                f"this server is not called {host[:_SHOWN_CHARS_MAX]!r}: without API keys it answers to "
                "localhost and 127.0.0.1 only, so that no web page reaches it under another name; the "
                "operator may name others in allowed_hosts (KVCOMMONS_ROUTER__ALLOWED_HOSTS)",
                param="Host",
            )

    def check_page(self, *, host: str, origin: str | None, site: str | None, navigates: bool) -> None:
        """Raises PermissionDenied for a request that a page of another site makes.

        `origin`, `site`: the headers Origin and Sec-Fetch-Site. `navigates`: the browser goes to another
        page with a GET, as by a link; the page that it came from sees nothing of the answer.
        """
        if self._keyed or (origin is not None and self.allows(origin)):
            return
        foreign = origin is not None and urlsplit(origin).netloc.lower() != host.lower()
        if not foreign and (site is None or site in _OWN_SITES or (navigates and origin is None)):
            return
        page = f"of {origin[:_SHOWN_CHARS_MAX]}" if origin is not None else "of another site"
        raise PermissionDenied(
            f"a web page {page} may not call this server: name its origin in cors_origins of [router] "
            "(KVCOMMONS_ROUTER__CORS_ORIGINS) if it should",
            param="Origin",
        )


def _name(host: str) -> str:
    """Without the port: `localhost:8000` and `[::1]:8000` give `localhost` and `::1`."""
    name, _, port = host.rpartition(":")
    if not name or not port.isdigit():
        name = host
    return name.strip("[]").rstrip(".").lower()


def _is_loopback(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
