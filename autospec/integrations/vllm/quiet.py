"""Steps without drafts, in which each row gets one token: followed for all rows at once, and counted later."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from autospec.integrations.vllm.rows import Tokens

_TAIL = 8


class Quiet:
    """Stands in for looking at each row, as long as nothing happens but one token more in each.

    Rows are told by their number, their lengths and their last tokens. Whoever counts these steps compares whole texts
    afterwards, so that what was mistaken for a request here is not taken for it.

    Args:
        lengths: [rows], tokens of each row by now.
        token_ids: [at least rows, longest].
    """

    def __init__(self, lengths: NDArray[np.int32], token_ids: Tokens) -> None:
        self._lengths = lengths.astype(np.int64)
        self._rows = np.arange(len(lengths))[:, None]
        self._tails = self._tails_of(token_ids)
        self._columns: list[Tokens] = []
        self.seconds = 0.0
        self.last_seen = 0.0  # when the last of these steps was

    @property
    def num_steps(self) -> int:
        return len(self._columns)

    @property
    def most_tokens(self) -> int:
        """Of the longest row."""
        return int(self._lengths.max(initial=0))

    def takes(
        self,
        sampled: Sequence[Sequence[int]],
        lengths: NDArray[np.int32],
        token_ids: Tokens,
        seconds: float,
        ends: Collection[int],
        now: float,
    ) -> bool:
        """Take in a step, if it is one of these. An end of an answer is not."""
        num_rows = len(self._lengths)
        is_one = len(sampled) == num_rows and all(len(tokens) == 1 for tokens in sampled)
        if not is_one or not np.array_equal(lengths[:num_rows], self._lengths + 1):
            return False
        column = [tokens[0] for tokens in sampled]
        if not set(column).isdisjoint(ends) or not np.array_equal(self._tails_of(token_ids), self._tails):
            return False
        self._columns.append(np.array(column, dtype=np.int32))
        self._lengths += 1
        self._tails = self._tails_of(token_ids)
        self.seconds += seconds
        self.last_seen = now
        return True

    def by_row(self) -> list[list[int]]:
        """[rows], the tokens that each got in these steps."""
        rows: list[list[int]] = np.stack(self._columns, axis=1).tolist()
        return rows

    def _tails_of(self, token_ids: Tokens) -> Tokens:
        """[rows, 8], the last tokens of each row."""
        places = self._lengths[:, None] - np.arange(_TAIL, 0, -1)[None, :]
        tails: Tokens = token_ids[self._rows, np.maximum(places, 0)]
        return tails
