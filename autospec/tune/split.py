"""What a policy is chosen on, and what it is judged by: whole conversations, never parts of a request."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from autospec.errors import ConfigurationError
from autospec.scores.scored import ScoredRequest

SPLITS = ("time", "conversation")
LEAST_REQUESTS = 2

Requests = list[ScoredRequest]


def split(requests: Sequence[ScoredRequest], *, by: str = "time", held_out: float = 0.3) -> tuple[Requests, Requests]:
    """Training part and held-out part, both in order of arrival.

    Args:
        requests: in order of arrival.
        by: `time`: the last ones are held out, as what is chosen now is to serve what comes; `conversation`: a share of
            the conversations, chosen by their ids. A conversation is never in both parts; one that reaches across the
            border in time belongs to the training part.
        held_out: share of the requests.

    Raises:
        ConfigurationError: there are too few for two parts, or the arguments are out of range.
    """
    if by not in SPLITS:
        raise ConfigurationError(f"split {by!r}: known are {', '.join(SPLITS)}")
    if not 0.0 < held_out < 1.0:
        raise ConfigurationError(f"held out {held_out!r}: a share between 0 and 1 is needed")
    if by == "time":
        border = round(len(requests) * (1.0 - held_out))
        begun = {_group(request) for request in requests[:border]}
        train = [request for request in requests if _group(request) in begun]
    else:
        train = [request for request in requests if _place(_group(request)) >= held_out]
    chosen = {request.request_id for request in train}
    rest = [request for request in requests if request.request_id not in chosen]
    if min(len(train), len(rest)) < LEAST_REQUESTS:
        raise ConfigurationError(
            f"{len(requests)} requests, {len(train)} of them to choose by and {len(rest)} to judge by: "
            f"at least {LEAST_REQUESTS} of each are needed"
        )
    return train, rest


def _group(request: ScoredRequest) -> str:
    return request.request_id if request.conversation is None else f"conversation {request.conversation}"


def _place(group: str) -> float:
    """From 0 to 1, the same in every run."""
    return int.from_bytes(hashlib.sha256(group.encode("utf-8", "surrogatepass")).digest()[:8], "big") / 2**64
