"""Talking to a server that the user has named, and to nobody else: no proxy, no redirection."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any
from urllib.parse import urlsplit

from autospec.errors import AutospecError, ConfigurationError
from autospec.fetching import one_line

MOST_BYTES = 16 << 20
"""Of an answer that is read whole."""


def is_address(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def checked(address: str) -> str:
    """The address without a slash at its end.

    Raises:
        ConfigurationError: it names no host, or a user.
    """
    try:
        parts = urlsplit(address)
        is_usable = is_address(address) and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # no port
        is_usable = False
    if not is_usable or any(character.isspace() or not character.isprintable() for character in address):
        raise ConfigurationError(f"{address[:80]!r} is no address: as in http://127.0.0.1:8000")
    if parts.username is not None:
        raise ConfigurationError(f"{parts.hostname}: an address with a user's name in it is not supported")
    return address.rstrip("/")


def read(address: str, timeout: float, *, key: str | None = None, accept: str = "*/*") -> bytes:
    """What a server answers.

    Raises:
        AutospecError: it cannot be reached, refuses, or takes longer; in one line.
    """
    deadline = time.monotonic() + timeout
    with _opened(_request(address, key, accept), timeout) as answer:
        found = bytearray()
        while part := answer.read1(1 << 16):  # type: ignore[attr-defined]
            found += part
            if len(found) > MOST_BYTES:
                raise AutospecError(f"{address} answers with more than {MOST_BYTES >> 20} MiB")
            if time.monotonic() > deadline:
                raise AutospecError(f"{address} took longer than {timeout:g} s (--timeout)")
        return bytes(found)


def read_json(address: str, timeout: float, *, key: str | None = None) -> Any:
    """The same as JSON. Raises: AutospecError: also where it is none."""
    try:
        return json.loads(read(address, timeout, key=key, accept="application/json"))
    except ValueError as error:
        raise AutospecError(f"{address} answers with what is no JSON: {one_line(error)}") from error


@contextmanager
def posted(address: str, body: Mapping[str, Any], timeout: float, *, key: str | None = None) -> Iterator[IO[bytes]]:
    """The answer to a request with JSON, to be read line by line. Raises: AutospecError: as `read`."""
    request = _request(address, key, "text/event-stream")
    request.data = json.dumps(body).encode()
    request.add_header("Content-Type", "application/json")
    with _opened(request, timeout) as answer:
        yield answer


def _request(address: str, key: str | None, accept: str) -> urllib.request.Request:
    headers = {"Accept": accept, "User-Agent": "autospec"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    return urllib.request.Request(address, headers=headers)


@contextmanager
def _opened(request: urllib.request.Request, timeout: float) -> Iterator[IO[bytes]]:
    address = request.full_url
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirection())
    try:
        with opener.open(request, timeout=timeout) as answer:
            yield answer
    except urllib.error.HTTPError as error:
        with error:
            said = _said(error)
        hint = ": it asks for a key" if error.code in (401, 403) else f": {said}" if said else ""
        raise AutospecError(f"{address} answers {error.code} {error.reason}{hint}") from error
    except TimeoutError as error:
        raise AutospecError(f"{address} took longer than {timeout:g} s") from error
    except urllib.error.URLError as error:
        reason = one_line(error.reason) if isinstance(error.reason, BaseException) else error.reason
        raise AutospecError(f"{address} cannot be reached: {reason}") from error
    except (http.client.HTTPException, OSError) as error:
        raise AutospecError(f"{address} broke off: {type(error).__name__}: {one_line(error)}") from error


def _said(error: urllib.error.HTTPError) -> str:
    """The message of an error, as OpenAI's servers give it."""
    try:
        found = json.loads(error.read(1 << 16))
        inner = found.get("error", found)
        return str(inner.get("message", ""))[:300]
    except (ValueError, AttributeError, OSError, http.client.HTTPException):  # it said it in another way
        return ""


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **named: Any) -> None:
        return None  # which makes it an error
