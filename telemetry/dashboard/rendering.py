"""The dashboard's templates. JSON within a page cannot end its element."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from autospec.telemetry.pages import rendering

_IN_A_PAGE = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def inline_json(value: Any) -> Markup:
    """JSON to stand in a script element of type application/json: with nothing in it that could end the element.

    Raises:
        ValueError: a number in it is not finite.
    """
    return Markup(json.dumps(value, allow_nan=False).translate(_IN_A_PAGE))


@cache
def environment() -> Environment:
    found = rendering.environment("autospec.telemetry.dashboard")
    found.filters["inline_json"] = inline_json
    return found


def render(template: str, values: Mapping[str, Any]) -> str:
    return environment().get_template(template).render(values)
