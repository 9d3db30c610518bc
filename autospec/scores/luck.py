"""Whether a model draft's token was accepted at each position: one draw for all policies."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from autospec.scores.scored import ScoredRequest


class Luck:
    """Draws from a seed, the request's id and the source's name, so that neither order nor company changes them.

    Args:
        seed: another one, another luck.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._known: dict[tuple[str, str], tuple[NDArray[np.float32], NDArray[np.int32]]] = {}

    def runs(self, request: ScoredRequest, source: str) -> NDArray[np.int32]:
        """[n], draft tokens accepted in a row from each position on. At the answer's end a run ends."""
        place, accept = (request.request_id, source), request.drafts[source].accept
        known = self._known.get(place)
        if known is None or known[0] is not accept:  # scored again, or somebody else's under that id
            digest = hashlib.sha256(f"{self.seed}/{request.request_id}/{source}".encode()).digest()
            draws = np.random.default_rng(int.from_bytes(digest[:8], "little")).random(len(accept))
            known = self._known[place] = (accept, runs(draws < accept))
        return known[1]


def runs(is_right: NDArray[np.bool_]) -> NDArray[np.int32]:
    """[n], how many are true in a row from each position on."""
    index = np.arange(len(is_right), dtype=np.int32)
    next_wrong = np.where(is_right, np.int32(len(is_right)), index)
    following: NDArray[np.int32] = np.minimum.accumulate(next_wrong[::-1])[::-1] - index
    return following
