"""Templates, and what they may call. Everything is escaped; JSON within a page cannot end its element."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from autospec.telemetry.dashboard import formats, marks
from autospec.telemetry.dashboard.definitions import definition
from autospec.telemetry.labels import visible
from autospec.telemetry.tables import interval, number

NAME_COLUMNS = 48
LONG_COLUMNS = 400

_IN_A_PAGE = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def inline_json(value: Any) -> Markup:
    """JSON to stand in a script element of type application/json: with nothing in it that could end the element.

    Raises:
        ValueError: a number in it is not finite.
    """
    return Markup(json.dumps(value, allow_nan=False).translate(_IN_A_PAGE))


def name(text: str) -> Markup:
    """A name from outside, shortened; what could act on a page is spelled out, and more of it stands on hover."""
    short, long = visible(text, NAME_COLUMNS), visible(text, LONG_COLUMNS)
    title = f' title="{escape(long)}"' if long != short else ""
    return Markup(f'<bdi class="outside"{title}>{escape(short) if short.strip() else "(empty)"}</bdi>')


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
def environment() -> Environment:
    found = Environment(
        loader=PackageLoader("autospec.telemetry.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "count": formats.count,
        "duration": formats.duration,
        "inline_json": inline_json,
        "interval": interval,
        "moment": moment,
        "name": name,
        "number": number,
        "percent": formats.percent,
        "visible": visible,
    }
    found.globals |= {"dot": marks.dot, "axis_head": marks.axis_head, "trend": marks.trend, "term": term}
    return found


def render(template: str, values: Mapping[str, Any]) -> str:
    return environment().get_template(template).render(values)
