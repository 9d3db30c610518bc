"""Who may ask, under which name, and what browsers may do with the answer."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from autospec.errors import ConfigurationError

COOKIE = "autospec_dashboard"
SHORTEST_TOKEN = 16

EMPTY_STYLE = "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
"""The hash of nothing. Plotly makes an empty style element and then adds rules to it one by one."""

POLICY = "; ".join(
    (
        "default-src 'self'",
        f"style-src 'self' {EMPTY_STYLE}",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
        "object-src 'none'",
    )
)

HEADERS: Mapping[str, str] = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}

OPEN_PATHS = ("/login", "/static/")
"""Answered without a token: nothing of the database is in them."""


class Secured:
    """Checks the host and the token of each request before the application sees it.

    Args:
        app: the application.
        token: what must come in the header `Authorization: Bearer ...` or in the cookie of /login; None: nothing.
        hosts: names under which it may be reached. Addresses and `localhost` are always allowed: a page elsewhere
            that has its own name resolved to this host still sends that name; `*`: any.
    """

    def __init__(self, app: ASGIApp, token: str | None = None, hosts: Collection[str] = ()) -> None:
        self._app = app
        self._token = token
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        path = route_path(scope)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                if "cache-control" not in headers:
                    headers["cache-control"] = "no-cache" if path.startswith("/static/") else "no-store"
            await send(message)

        refused = self._refuse(scope, path)
        await (self._app if refused is None else refused)(scope, receive, answer)

    def _refuse(self, scope: Scope, path: str) -> Response | None:
        if "\0" in path:  # no file or page has it in its name, and looking for such a file fails
            return PlainTextResponse("there is no such page", status_code=404)
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not is_allowed(host, self._hosts):
            return PlainTextResponse("this host name is not served here: add it with --allow-host", status_code=400)
        if self._token is None or path == OPEN_PATHS[0] or path.startswith(OPEN_PATHS[1]):
            return None
        if self._knows_token(headers):
            return None
        if scope["method"] == "GET" and "text/html" in headers.get("accept", ""):
            return RedirectResponse(f"{scope.get('root_path', '')}/login", status_code=303)
        return PlainTextResponse(
            "a token is needed: Authorization: Bearer ...", status_code=401, headers={"www-authenticate": "Bearer"}
        )

    def _knows_token(self, headers: Headers) -> bool:
        token = self._token or ""
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and is_same(given.strip(), token):
            return True
        found = [part.strip().partition("=") for part in headers.get("cookie", "").split(";")]
        return any(name == COOKIE and is_same(value, cookie_of(token)) for name, _, value in found)


def check_token(token: str | None) -> None:
    """Raises: ConfigurationError: it is too short, or cannot be sent in a header as it is."""
    if token is not None and not (token.isascii() and token.isprintable() and token == token.strip()):
        raise ConfigurationError(
            "the token has blanks around it, or characters that are not printable ASCII, which no header holds: "
            "leave them out"
        )
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise ConfigurationError(
            f"the token has {len(token)} characters: give at least {SHORTEST_TOKEN}, as in "
            'python -c "import secrets; print(secrets.token_urlsafe())"'
        )


def is_same(given: str, wanted: str) -> bool:
    """Compared in constant time."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode("utf-8", "replace"))


def cookie_of(token: str) -> str:
    """What the cookie holds in place of the token."""
    return hashlib.sha256(f"autospec dashboard {token}".encode("utf-8", "replace")).hexdigest()


def is_allowed(host: str, hosts: Collection[str]) -> bool:
    """Whether a Host header names this server: an address, `localhost`, or one of the names."""
    if "*" in hosts:
        return True
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if "@" in host or "/" in host:
        return False
    if name == "localhost" or name in hosts:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def route_path(scope: Scope) -> str:
    """The path within the application, wherever that is mounted."""
    return str(scope["path"]).removeprefix(str(scope.get("root_path", "")))
