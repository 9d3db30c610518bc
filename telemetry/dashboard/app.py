"""The application: addresses, and what answers to each."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, parse_qsl

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from autospec.errors import AutospecError, ConfigurationError, ModelError
from autospec.telemetry.dashboard import drift_charts, segment_charts
from autospec.telemetry.dashboard.decisions import load_decisions
from autospec.telemetry.dashboard.filters import DECODINGS, PERIODS, Filters, parse
from autospec.telemetry.dashboard.live import changes
from autospec.telemetry.dashboard.overview import Options, Overview, Sorting, load_options, load_overview, ordered
from autospec.telemetry.dashboard.remembered import Remembered
from autospec.telemetry.dashboard.rendering import render
from autospec.telemetry.dashboard.reports import load_report, load_segments, stamp
from autospec.telemetry.dashboard.request import CELLS, MOST_TOKENS, is_empty, load_request
from autospec.telemetry.dashboard.security import COOKIE, HEADERS, Secured, check_token, cookie_of, is_same
from autospec.telemetry.dashboard.segment import load_segment
from autospec.telemetry.dashboard.tokens import Decoder, texts_of
from autospec.telemetry.dashboard.tuning import OPTUNA_DASHBOARD, label, load_tuning
from autospec.telemetry.engine_tables import engine_tables
from autospec.telemetry.explain import LAST
from autospec.telemetry.pages import marks
from autospec.telemetry.pages.definitions import DEFINITIONS
from autospec.telemetry.render_csv import to_csv
from autospec.telemetry.render_json import to_dict
from autospec.telemetry.rows import Report
from autospec.telemetry.store import Store

_log = logging.getLogger("autospec.telemetry")

HERE = Path(__file__).parent
PAGES = "autospec.telemetry.pages"
"""Has what these pages share with the report's."""

PLOTLY = Path(str(files("plotly"))) / "package_data" / "plotly.min.js"
MOST_FORM_BYTES = 4_096
MOST_FIELDS = 100
DAY = 86_400

T = TypeVar("T")


def create_app(
    store: Store | str,
    *,
    token: str | None = None,
    allowed_hosts: Collection[str] = (),
    study_storage: str | None = None,
    policy_file: Path | None = None,
    tokenizer: str | None = None,
) -> Starlette:
    """The dashboard, to be served alone or mounted into another ASGI application.

    Args:
        store: the database, or its URL. It is opened anew, read-only, so that nothing is ever written, and closed when
            the application ends. A store that is read-only is used as it is and left open, and so is one in memory,
            which nobody else can open. The end of a *mounted* application is told to nobody: give that a read-only
            store, and close it yourself.
        token: asked for in the header `Authorization: Bearer ...`, or once on a page that sets a cookie; None: nobody
            is asked. An application that it is mounted into may ask in its own way.
        allowed_hosts: names under which it is reached, besides addresses and `localhost`; `*`: any.
        study_storage: of `autospec tune`, for the page on tuning.
        policy_file: the same.
        tokenizer: folder, hub id or known name of the target's tokenizer, by which recorded tokens are shown as text.
            It is loaded when it is first needed; of a folder, from nowhere else.

    Raises:
        ConfigurationError: the URL is of another kind, or the token is too short.
        ModelError: there is no such tokenizer.
        StoreError: the database cannot be used.
    """
    check_token(token)
    decoder = None if tokenizer is None else Decoder(tokenizer)
    opened = _opened(store)
    pages = Pages(opened, token, study_storage, policy_file, decoder)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        warming = asyncio.create_task(run_in_threadpool(pages.warm_up))
        try:
            yield
            await warming
        finally:
            if opened is not store:
                opened.close()

    app = Starlette(
        lifespan=lifespan,
        routes=[
            Route("/", pages.overview),
            Route("/segment", pages.segment),
            Route("/request", pages.request),
            Route("/decisions", pages.decisions),
            *([Route("/tuning", pages.tuning)] if pages.has_tuning else []),
            Route("/definitions", pages.definitions),
            Route("/export.json", pages.export_json),
            Route("/export.csv", pages.export_csv),
            Route("/events", pages.events),
            Route("/login", pages.login, methods=["GET", "POST"]),
            Route("/static/plotly.min.js", pages.plotly),
            Mount("/static", StaticFiles(directory=HERE / "static", packages=[(PAGES, "static")])),
        ],
        middleware=[Middleware(Secured, token=token, hosts=allowed_hosts)],
        exception_handlers={HTTPException: pages.refused, AutospecError: pages.refused, Exception: pages.broken},
    )
    app.state.is_ending = lambda: False  # a server that ends says so here, and pages that wait for updates are let go
    return app


class Pages:
    """Answers to addresses."""

    def __init__(
        self,
        store: Store,
        token: str | None = None,
        study_storage: str | None = None,
        policy_file: Path | None = None,
        decoder: Decoder | None = None,
    ) -> None:
        self._store = store
        self._token = token
        self._study_storage = study_storage
        self._policy_file = policy_file
        self._decoder = decoder
        self.has_tuning = study_storage is not None or policy_file is not None
        self._remembered = Remembered()

    def warm_up(self) -> None:
        """Reads what the first page will most likely ask for, before it does."""
        try:
            self._load_overview(Filters())
            self._options(stamp(self._store))
        except AutospecError as error:
            _log.warning("the database cannot be read: %s", error)
        except Exception:  # noqa: BLE001  # the page that needs it will fail, too, and say so; the server serves all others
            _log.exception("the first page could not be read ahead")

    def overview(self, request: Request) -> Response:
        filters, others = _read(request, ("sort", "search"))
        sort, search = others.get("sort", "speed-up"), others.get("search", "")
        found, now = self._load_overview(filters)
        lines = ordered(found.lines, sort, search)
        rows = [line.row for line in lines]
        address = self._addresses(request, filters)
        sorting = Sorting(sort, lambda key: address("/", search=search, sort=f"-{key}" if sort == key else key))
        return self._page(
            request,
            "overview.html",
            filters,
            now,
            page="overview",
            keep={"sort": others.get("sort"), "search": search},
            found=found,
            row=found.report.all,
            rows=rows,
            engine_tables=engine_tables(found.report.engines),
            axis=marks.axis_of([line.row for line in found.lines]),
            sorting=sorting,
            search=search,
            open_segment=lambda name: address("/segment", segment=name),
            trends={line.name: line.times.speed_ups for line in lines if line.times is not None},
        )

    def segment(self, request: Request) -> Response:
        filters, others = _read(request, ("segment",))
        if "segment" not in others:
            raise ConfigurationError("the address names no segment: open one from the overview")
        name = others["segment"]
        found, now = self._load(f"segment {name}", filters, lambda: load_segment(self._store, filters, name))
        shown = [segment_charts.split(found.report.all)] if found.report.all.requests else []
        if found.times is not None:
            shown.insert(0, segment_charts.over_time(found.times, found.changes))
        if found.survival:
            shown.append(segment_charts.survival(found.survival))
        if any(each.goodput is not None for each in found.actions):
            shown.append(segment_charts.goodput(found.actions, found.predicted))
        if found.acceptance_lengths:
            shown.append(segment_charts.lengths(found))
        row = found.report.segments[0] if found.report.segments else found.report.all
        return self._page(
            request,
            "segment.html",
            filters,
            now,
            page="segment",
            keep={"segment": name},
            found=found,
            row=row,
            charts=shown,
            axis=marks.axis_of([row]),
        )

    def request(self, request: Request) -> Response:
        filters, others = _read(request, ("id",))
        now = stamp(self._store)  # before it is read: what is written meanwhile must not seem to be shown
        if others.get("id", LAST) == LAST and is_empty(self._store):
            values = {"page": "request", "keep": {}}
            return self._page(request, "no_request.html", Filters(), now, **values)
        found = load_request(self._store, others.get("id", LAST))
        texts, trouble = None, None
        try:
            texts = None if self._decoder is None else texts_of(found, self._decoder)
        except ModelError as error:
            trouble = str(error)
        return self._page(
            request,
            "request.html",
            filters,
            now,
            page="request",
            keep={"id": found.record.request_id},
            found=found,
            record=found.record,
            cells=CELLS,
            most_tokens=MOST_TOKENS,
            texts=texts,
            trouble=trouble,
        )

    def decisions(self, request: Request) -> Response:
        filters, _ = _read(request)
        found, now = self._load("decisions", filters, lambda: load_decisions(self._store, filters, self._segments))
        shown = []
        if found.actions.blocks:
            shown.append(drift_charts.actions_over_time(found.actions))
        if found.traffic is not None:
            shown.append(drift_charts.control_share(found.traffic))
        if any(row.speed_up and row.prediction.speed_up for row in found.report.segments):
            shown.append(drift_charts.calibration(found))
        if found.actions.plain_seconds:
            shown.append(drift_charts.plain_step(found.actions))
        values = {"page": "decisions", "keep": {}, "found": found, "charts": shown}
        return self._page(request, "decisions.html", filters, now, **values)

    def tuning(self, request: Request) -> Response:
        filters, _ = _read(request)
        now = stamp(self._store)
        found = load_tuning(self._store, self._study_storage, self._policy_file)
        values = {"page": "tuning", "keep": {}, "found": found, "label": label, "optuna_dashboard": OPTUNA_DASHBOARD}
        return self._page(request, "tuning.html", filters, now, **values)

    def definitions(self, request: Request) -> Response:
        filters, _ = _read(request)
        values = {"page": "definitions", "keep": {}, "meanings": DEFINITIONS}
        return self._page(request, "definitions.html", filters, stamp(self._store), **values)

    def export_json(self, request: Request) -> Response:
        filters, _ = _read(request)
        headers = {"content-disposition": 'attachment; filename="autospec.json"'}
        text = json.dumps(to_dict(load_report(self._store, filters)))
        return Response(text, media_type="application/json", headers=headers)

    def export_csv(self, request: Request) -> Response:
        filters, _ = _read(request)
        headers = {"content-disposition": 'attachment; filename="autospec.csv"'}
        text = to_csv(load_report(self._store, filters))
        return Response(text.encode("utf-8", "replace"), media_type="text/csv; charset=utf-8", headers=headers)

    async def events(self, request: Request) -> Response:
        async def is_gone() -> bool:
            return request.app.state.is_ending() or await request.is_disconnected()

        return StreamingResponse(
            changes(self._store, is_gone),
            media_type="text/event-stream",
            headers={"x-accel-buffering": "no"},
        )

    async def login(self, request: Request) -> Response:
        base = request.scope.get("root_path", "")
        if self._token is None:
            return RedirectResponse(f"{base}/", status_code=303)
        if request.method == "GET":
            return HTMLResponse(render("login.html", {"base": base, "is_wrong": False}))
        body = b""
        try:
            async for part in request.stream():
                body += part
                if len(body) > MOST_FORM_BYTES:
                    raise HTTPException(413, "the form is too long")
        except ClientDisconnect as error:
            raise HTTPException(400, "the form did not come to its end") from error
        given = parse_qs(body.decode("utf-8", "replace")).get("token", [""])[0]
        if not is_same(given.strip(), self._token):
            return HTMLResponse(render("login.html", {"base": base, "is_wrong": True}), status_code=403)
        answer = RedirectResponse(f"{base}/", status_code=303)
        answer.set_cookie(
            COOKIE,
            cookie_of(self._token),
            max_age=30 * DAY,
            path=f"{base}/",
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
        return answer

    def plotly(self, request: Request) -> Response:
        headers = {"cache-control": f"max-age={DAY}"}
        return FileResponse(PLOTLY, media_type="text/javascript", headers=headers)

    async def refused(self, request: Request, error: Exception) -> Response:
        """One page for everything that went wrong on purpose."""
        status = 400 if isinstance(error, ConfigurationError) else 503
        text = str(error)
        if isinstance(error, HTTPException):
            status, text = error.status_code, error.detail
            text = "there is no such page" if status == 404 else text
        values = {"base": request.scope.get("root_path", ""), "status": status, "text": text}
        return HTMLResponse(render("error.html", values), status_code=status)

    async def broken(self, request: Request, error: Exception) -> Response:
        """A fault of ours: what it was stands in the log of the server."""
        values = {"base": request.scope.get("root_path", ""), "status": 500}
        text = "this page failed; the server's log says why"
        return HTMLResponse(render("error.html", {**values, "text": text}), status_code=500, headers=HEADERS)

    def _load_overview(self, filters: Filters) -> tuple[Overview, str]:
        return self._load("overview", filters, lambda: load_overview(self._store, filters, self._segments))

    def _segments(self, store: Store, filters: Filters) -> Report:
        """The report that several pages are made of; never an older one, as a page is as old as it says."""
        return self._load("segments", filters, lambda: load_segments(store, filters), exact=True)[0]

    def _options(self, now: str) -> Options:
        options, _ = self._remembered.get("options", now, lambda: load_options(self._store))
        return options

    def _load(self, name: str, filters: Filters, make: Callable[[], T], *, exact: bool = False) -> tuple[T, str]:
        return self._remembered.get((name, filters), stamp(self._store), make, exact=exact)

    def _page(self, request: Request, template: str, filters: Filters, now: str, **values: Any) -> Response:
        shared = {
            "filter_values": dict(parse_qsl(filters.query())),
            "address": self._addresses(request, filters),
            "base": request.scope.get("root_path", ""),
            "decodings": DECODINGS,
            "filters": filters,
            "has_tuning": self.has_tuning,
            "options": self._options(now),
            "periods": tuple(PERIODS),
            "plotly_style": plotly_style,
            "place": self._store.url,
            "stamp": now,
        }
        return HTMLResponse(render(template, {**shared, **values}))

    @staticmethod
    def _addresses(request: Request, filters: Filters) -> Callable[..., str]:
        """Writes addresses of pages, with the filters in them."""
        base = request.scope.get("root_path", "")

        def address(path: str, **changes: str | None) -> str:
            query = filters.query(**changes)
            return f"{base}{path}?{query}" if query else f"{base}{path}"

        return address


@cache
def plotly_style() -> str | None:
    """The id of a style element that Plotly makes for maps, unless one is there: the pages have one, and no maps."""
    found = re.search(rb'getElementById\("([0-9a-f]{64})"\)', PLOTLY.read_bytes())
    return found and found.group(1).decode("ascii")


def _opened(store: Store | str) -> Store:
    """The database for reading only."""
    if isinstance(store, str):
        return Store(store, readonly=True)
    return store if store.readonly or not store.is_lasting else store.reopened()


def _read(request: Request, others: Collection[str] = ()) -> tuple[Filters, dict[str, str]]:
    try:
        pairs = parse_qsl(request.url.query, keep_blank_values=True, max_num_fields=MOST_FIELDS, errors="replace")
    except ValueError as error:
        raise ConfigurationError(f"the address has more than {MOST_FIELDS} parts") from error
    return parse(pairs, datetime.now(UTC), others)
