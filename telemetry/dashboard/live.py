"""Server-sent events: a page is told when the database has changed, and asks for itself again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.concurrency import run_in_threadpool

from autospec.errors import StoreError
from autospec.telemetry.dashboard.reports import stamp
from autospec.telemetry.store import Store

POLL_SECONDS = 2.0
QUIET_POLLS = 7
"""After so many without a change a comment is sent, so that proxies keep the connection."""


async def changes(
    store: Store, is_gone: Callable[[], Awaitable[bool]], poll_seconds: float = POLL_SECONDS
) -> AsyncIterator[str]:
    """One event with the database's stamp at once, and one after each change of it, until the reader is gone.

    Args:
        store: the database; each look at it is one short transaction.
        is_gone: whether the reader has closed the connection.
        poll_seconds: between two looks.
    """
    yield "retry: 3000\n\n"
    known, quiet = "", 0
    while not await is_gone():
        try:
            now = await run_in_threadpool(stamp, store)
        except StoreError:
            yield "event: trouble\ndata: the database cannot be read\n\n"
        else:
            quiet += 1
            if now != known:
                known, quiet = now, 0
                yield f"event: stamp\ndata: {now}\n\n"
            elif quiet % QUIET_POLLS == 0:
                yield ": still here\n\n"
        await asyncio.sleep(poll_seconds)
