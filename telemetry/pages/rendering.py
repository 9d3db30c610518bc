"""Templates, and what they may call. Everything is escaped; names from outside are shortened and spelled out."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from autospec.telemetry.labels import visible
from autospec.telemetry.pages import formats, marks
from autospec.telemetry.pages.definitions import DEFINITIONS, definition
from autospec.telemetry.tables import interval, number

PACKAGE = "autospec.telemetry.pages"
NAME_COLUMNS = 48
LONG_COLUMNS = 400
LINE_COLUMNS = 20_000


def name(text: str) -> Markup:
    """A name from outside, shortened; what could act on a page is spelled out, and more of it stands on hover."""
    short, long = visible(text, NAME_COLUMNS), visible(text, LONG_COLUMNS)
    title = f' title="{escape(long)}"' if long != short else ""
    return Markup(f'<bdi class="outside"{title}>{escape(short) if short.strip() else "(empty)"}</bdi>')


def lines(text: str) -> str:
    """Text from outside with its line breaks; what could act on a page is spelled out."""
    return "\n".join(visible(line, LINE_COLUMNS) for line in text.expandtabs(4).split("\n"))


def moment(time: datetime) -> Markup:
    """A time in UTC, which the page's script turns into the reader's own."""
    utc = formats.shown(time)
    return Markup(f'<time datetime="{formats.iso(time)}" title="{utc}">{utc}</time>')


def term(called: str, shown: str | None = None) -> Markup:
    """The name of a number, with what it means on hover and on focus."""
    meaning = escape(definition(called))
    said = f'data-definition="{meaning}" title="{meaning}"'
    return Markup(f'<span class="term" tabindex="0" {said}>{escape(shown or called)}</span>')


@cache
def style() -> Markup:
    """The style sheet, to stand in a page of one file."""
    return Markup((files(PACKAGE) / "static" / "style.css").read_text(encoding="utf-8"))


@cache
def environment(*packages: str) -> Environment:
    """Templates of these packages, and of this one."""
    found = Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in (*packages, PACKAGE)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "count": formats.count,
        "duration": formats.duration,
        "interval": interval,
        "lines": lines,
        "moment": moment,
        "name": name,
        "number": number,
        "percent": formats.percent,
        "visible": visible,
    }
    found.tests["defined_number"] = DEFINITIONS.__contains__
    found.globals |= {"dot": marks.dot, "axis_head": marks.axis_head, "trend": marks.trend, "term": term}
    return found


def render(template: str, values: Mapping[str, Any]) -> str:
    return environment().get_template(template).render(values)
