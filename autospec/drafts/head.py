"""What `Heads` drives: weights that all requests share, and what is kept of one request."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import transformers

from autospec.errors import DraftError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

OLDEST_TRANSFORMERS = (5, 24)  # from here on it runs these layers one by one, and counts hidden states as it does now


class Head(Protocol):
    """Layers that draft from the target's hidden states; no state of any request."""

    hidden_layers: tuple[int, ...]  # which hidden states of the target they read, as transformers counts them
    most_tokens: int  # of one block

    def start(self) -> HeadState:
        """What it keeps of one request, empty."""


class HeadState(Protocol):
    """What the layers keep of one request. `begin`, then `logits` once for each token of the block, in order."""

    cache: Any  # of the layers

    def see(self, hidden_states: Tensor) -> None:
        """Take in the next committed positions; nothing is run yet.

        Args:
            hidden_states: [n, layers x hidden_size], the layers asked for side by side.
        """

    def catch_up(self, committed: Sequence[int], num_tokens: int) -> None:
        """Run what a block of so many tokens would have to run of the text anyway, but for its last token."""

    def begin(self, committed: Sequence[int], num_tokens: int) -> None:
        """Start a block of at most so many tokens."""

    def logits(self, drafted: Sequence[int]) -> Tensor:
        """[vocab_size], of the position after `drafted`, the tokens of the block so far."""


def of_transformers(module: str, name: str) -> Any:
    """A class that older releases lack, or have in another form.

    Raises:
        DraftError: this release is one of them.
    """
    release = tuple(int(number) for number in re.findall(r"\d+", transformers.__version__)[:2])
    found = getattr(import_module(f"transformers.{module}"), name, None)
    if release < OLDEST_TRANSFORMERS or found is None:
        oldest = ".".join(map(str, OLDEST_TRANSFORMERS))
        raise DraftError(
            f"heads need {name} of transformers {oldest} or newer, this is {transformers.__version__}: upgrade it, or "
            "use another draft source"
        )
    return found


def hidden_size_of(target: PreTrainedModel) -> int:
    return int(target.config.get_text_config(decoder=True).hidden_size)
