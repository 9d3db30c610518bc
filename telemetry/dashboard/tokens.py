"""Recorded token ids as text, by the target's tokenizer. It comes from outside: it is shown, and does nothing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autospec.errors import ModelError
from autospec.models import load_tokenizer, resolve
from autospec.telemetry.dashboard.request import MOST_TOKENS, Request

_log = logging.getLogger("autospec.telemetry")

RETRY_SECONDS = 60.0
"""A tokenizer that could not be loaded is not asked for again before that: the hub may take long to say no."""


class Decoder:
    """Turns ids into text. The tokenizer is loaded when it is first needed, without code that comes with it.

    Args:
        name: a folder, from which alone it is then read, a hub id, or a name that `autospec.models` knows.
        clock: seconds.

    Raises:
        ModelError: there is no such folder.
    """

    def __init__(self, name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._place = resolve(name)
        folder = Path(name).expanduser()
        self.name = folder.resolve().name if folder.is_dir() else name
        """Without the path to it: readers of a page need not know the folders of this host."""
        self._clock = clock
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._failed_at: float | None = None

    def __call__(self, ids: Sequence[int]) -> str:
        """The text of some tokens, special ones included.

        Raises:
            ModelError: the tokenizer cannot be loaded, or does not know one of them.
        """
        with self._lock:  # tokenizers are not for several threads at a time
            tokenizer = self._load()
            if unknown := [token for token in ids if not 0 <= token < len(tokenizer)]:
                has = f"the tokenizer {self.name} has {len(tokenizer):,} tokens"
                raise ModelError(f"{has}, and no {unknown[0]}: it is of another model")
            return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _load(self) -> Any:
        if self._tokenizer is None:
            if self._failed_at is None or self._clock() - self._failed_at >= RETRY_SECONDS:
                try:
                    self._tokenizer = load_tokenizer(self._place)
                except ModelError as error:
                    self._failed_at = self._clock()
                    _log.warning("%s", error)
            if self._tokenizer is None:
                raise ModelError(f"cannot load the tokenizer {self.name!r}; the server's log says why")
        return self._tokenizer


@dataclass(frozen=True, slots=True)
class Texts:
    """What the tokens of a request say, as far as the page shows them."""

    by: str  # the tokenizer's name
    prompt: str
    output: str
    blocks: tuple[str | None, ...]  # of the tokens that each block committed; None: they are not known


def texts_of(found: Request, decoder: Decoder) -> Texts | None:
    """The texts of a request; None where its tokens were not recorded.

    Raises:
        ModelError: the tokenizer cannot be loaded, or is another model's.
    """
    if found.prompt is None or found.output is None:
        return None
    return Texts(
        by=decoder.name,
        prompt=decoder(found.prompt[:MOST_TOKENS]),
        output=decoder(found.output[:MOST_TOKENS]),
        blocks=tuple(None if block.tokens is None else decoder(block.tokens) for block in found.blocks),
    )
