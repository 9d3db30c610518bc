"""One scrape: from an address or a file to what engines have counted."""

from __future__ import annotations

import re
import socket
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from autospec.errors import AutospecError, ConfigurationError
from autospec.integrations.vllm import web
from autospec.integrations.vllm.exposition import counters_in
from autospec.integrations.vllm.ingest import Origin
from autospec.types import EngineCounters

_LOOPBACK = re.compile(r"localhost|127\.[0-9.]+|::1")
_METRIC = re.compile(rb"(#|[a-zA-Z_:][a-zA-Z0-9_:]*[ {])")
_HEAD = 4096


def metrics_address(address: str) -> str:
    """Where a server has its metrics: `/metrics`, unless the address has a path. Raises: as `web.checked`."""
    checked = web.checked(address)
    return checked if urlsplit(checked).path else f"{checked}/metrics"


def name_of(address: str) -> str:
    """Host and port; a loopback is this host, whoever looks at it."""
    parts = urlsplit(address)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"{socket.gethostname() if _LOOPBACK.fullmatch(host) else host}:{port}"


def scrape(address: str, origin: Origin, timeout: float) -> list[EngineCounters]:
    """What the engines behind an address, as `metrics_address` gives it, have counted by now.

    Raises:
        ConfigurationError: prometheus-client is not installed.
        AutospecError: they cannot be reached, or are not vLLM's; in one line.
    """
    content = web.read(address, timeout, accept="text/plain;version=0.0.4")
    return _counters(content, address, origin, name_of(address), datetime.now(UTC))


def is_exposition(path: Path) -> bool:
    """Does it begin as metrics do, rather than as JSON?"""
    try:
        with path.open("rb") as file:
            return _METRIC.match(file.read(_HEAD).lstrip()) is not None
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror or error}") from error


def scraped(path: Path, origin: Origin) -> list[EngineCounters]:
    """The same from a file with what /metrics said; without timestamps in it, when the file was last changed.

    Raises:
        ConfigurationError: it cannot be read, or prometheus-client is not installed.
        AutospecError: it is not vLLM's.
    """
    try:
        content, changed = path.read_bytes(), path.stat().st_mtime
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror or error}") from error
    return _counters(content, str(path), origin, socket.gethostname(), datetime.fromtimestamp(changed, UTC))


def _counters(content: bytes, where: str, origin: Origin, name: str, at: datetime) -> list[EngineCounters]:
    try:
        return counters_in(content.decode("utf-8"), origin, name, at)
    except ConfigurationError:
        raise
    except (AutospecError, UnicodeDecodeError) as error:
        raise AutospecError(f"{where}: {error}") from error


def in_words(counters: EngineCounters) -> str:
    """One line on what an engine has counted."""
    said = f"{counters.engine} {counters.target}: {counters.output_tokens or 0} tokens generated"
    if counters.num_drafts is None:
        return f"{said}, no speculation"
    judged = f"{counters.num_accepted_tokens or 0} of {counters.num_draft_tokens or 0} draft tokens accepted"
    return f"{said}, {counters.num_drafts} drafts, {judged}"
