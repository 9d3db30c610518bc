"""Recorded token ids as text, by the target's tokenizer. It comes from outside: it is shown, and does nothing."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autospec.errors import ModelError
from autospec.models import load_tokenizer, resolve
from autospec.telemetry.dashboard.request import MOST_TOKENS, Request


class Decoder:
    """Turns ids into text. The tokenizer is loaded when it is first needed, without code that comes with it.

    Args:
        name: a folder, from which alone it is then read, a hub id, or a name that `autospec.models` knows.

    Raises:
        ModelError: there is no such folder.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._place = resolve(name)
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._trouble: ModelError | None = None

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
        if self._trouble is not None:
            raise self._trouble
        if self._tokenizer is None:
            try:
                self._tokenizer = load_tokenizer(self._place)
            except ModelError as error:
                self._trouble = error
                raise
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
