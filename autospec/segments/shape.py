"""What a prompt looks like, in numbers of no language: what clusters see besides its words."""

from __future__ import annotations

import math
from collections.abc import Sequence

NAMES = ("log_tokens", "repetition", "digits", "symbols", "capitals", "not_ascii", "lines")

_SYMBOLS = b'{}[]()<>=;:_|/\\*#"`'
_DIGITS = b"0123456789"


def shape(text: str, prompt_tokens: int) -> Sequence[float]:
    """[7], as in `NAMES`: the logarithm of the length, shares of words that repeat themselves, and of characters.

    Args:
        text: the excerpt of a prompt.
        prompt_tokens: of the whole prompt.
    """
    raw = text.encode("utf-8", "replace")
    size = max(1, len(text))
    words = text.split()
    return (
        math.log2(1 + prompt_tokens),
        1 - len(set(words)) / max(1, len(words)),
        share_of(raw, _DIGITS),
        share_of(raw, _SYMBOLS),
        sum(map(str.istitle, words)) / max(1, len(words)),
        (len(text) - len(text.encode("ascii", "ignore"))) / size,
        text.count("\n") / size,
    )


def share_of(raw: bytes, characters: bytes) -> float:
    """How much of a text in UTF-8 is one of some ASCII characters, in bytes."""
    return (len(raw) - len(raw.translate(None, characters))) / max(1, len(raw))
