"""Names from outside (segments, policies, devices) made fit to be shown: they may hold anything."""

from __future__ import annotations

import unicodedata

ELLIPSIS = "\u2026"
_HIDDEN = frozenset(["Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"])  # control, direction marks, surrogates, unassigned
_MARKS_IN_A_ROW = 2


def visible(text: str, limit: int) -> str:
    """The text on one line, with everything that could act on a terminal or a page spelled out.

    Args:
        text: any string.
        limit: columns it may take; a longer one ends in an ellipsis.

    Returns:
        At most `limit` columns. Control characters, direction marks and the like appear as in `\\x1b` or `\\u202e`.
    """
    shown: list[str] = []
    marks = 0
    for character in text[: 4 * limit + 1]:
        category = unicodedata.category(character)
        if category in _HIDDEN:
            shown.append(ascii(character)[1:-1])
        elif category in ("Mn", "Me"):
            marks += 1
            if marks <= _MARKS_IN_A_ROW:
                shown.append(character)
            continue
        else:
            shown.append(" " if category == "Zs" else character)
        marks = 0
    return clip("".join(shown) + ("" if len(text) <= 4 * limit + 1 else ELLIPSIS), limit)


def clip(text: str, limit: int) -> str:
    """The text cut to `limit` columns, the last of which is then an ellipsis."""
    if columns(text) <= limit:
        return text
    kept, used = [], 0
    for character in text:
        used += columns(character)
        if used > limit - 1:
            break
        kept.append(character)
    return "".join(kept) + ELLIPSIS


def columns(text: str) -> int:
    """Terminal columns that the text takes."""
    return sum(_column(character) for character in text)


def _column(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


def pad(text: str, width: int, *, right: bool = False) -> str:
    """The text filled with spaces to `width` columns; `right` puts it at the right end."""
    space = " " * max(0, width - columns(text))
    return space + text if right else text + space
