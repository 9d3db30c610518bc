"""What transformers does with `num_assistant_tokens_schedule="heuristic"`, to compare with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from autospec.errors import ConfigurationError
from autospec.policies.reading import check_whole, reading_state
from autospec.policies.transformers_constant import NUM_ASSISTANT_TOKENS, check_source
from autospec.types import OFF, Action, BlockContext, BlockOutcome, RequestContext

_MAX_REQUESTS = 1_000


class TransformersHeuristic:
    """Two draft tokens more after a block that was accepted whole, one less after any other, at least one.

    A block without a proposal changes nothing: in transformers prompt lookup, which knows misses, has no schedule.

    Args:
        source: a draft source's name.
        num_assistant_tokens: what the block length starts from.
        transient: it starts anew with each request (`"heuristic_transient"`); otherwise requests share one block length
            (`"heuristic"`). In transformers what a request made of it is kept at its end, here at once.

    Raises:
        ConfigurationError: a setting is out of range.

    Source: transformers 5.24, generation/candidate_generator.py, `update_candidate_strategy`.
    """

    def __init__(
        self, source: str, *, num_assistant_tokens: int = NUM_ASSISTANT_TOKENS, transient: bool = False
    ) -> None:
        check_source(source)
        check_whole("num_assistant_tokens", num_assistant_tokens, 1)
        if not isinstance(transient, bool):
            raise ConfigurationError(f"transient={transient!r}: True or False is needed")
        self.name = "transformers_heuristic_transient" if transient else "transformers_heuristic"
        self.source = source
        self.settings: dict[str, object] = {
            "source": source,
            "num_assistant_tokens": num_assistant_tokens,
            "transient": transient,
        }
        self._start = num_assistant_tokens
        self._transient = transient
        self._shared = num_assistant_tokens
        self._requests: dict[RequestContext, tuple[int, int]] = {}  # block length, output tokens at its last choice
        self._last: RequestContext | None = None

    def choose(self, context: BlockContext) -> Action:
        wanted = min(self._wanted(context), context.tokens_left - 1)
        if wanted < 1 or self.source not in context.sources:
            return OFF
        return Action(self.source, wanted, "kept: heuristic schedule")

    def observe(self, outcome: BlockOutcome) -> None:
        if outcome.action.source != self.source or not outcome.num_draft_tokens:
            return
        is_whole = outcome.num_accepted_tokens == outcome.num_draft_tokens
        if not self._transient:
            self._shared = _next(self._shared, is_whole)
            return
        request = outcome.request or self._last
        if request in self._requests:
            wanted, output_tokens = self._requests[request]
            self._requests[request] = _next(wanted, is_whole), output_tokens

    def _wanted(self, context: BlockContext) -> int:
        if not self._transient:
            return self._shared
        self._last = context.request
        wanted, output_tokens = self._requests.pop(context.request, (self._start, -1))
        if context.output_tokens <= output_tokens:  # another request, which looks like an earlier one
            wanted = self._start
        self._requests[context.request] = wanted, context.output_tokens
        if len(self._requests) > _MAX_REQUESTS:
            del self._requests[next(iter(self._requests))]
        return wanted

    def state(self) -> dict[str, Any]:
        """What it has learned, as plain JSON values."""
        requests = [[asdict(request), *numbers] for request, numbers in self._requests.items()]
        return {"num_assistant_tokens": self._shared, "requests": requests}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what another one had learned.

        Raises:
            ConfigurationError: this is no such state.
        """
        with reading_state(self.name, state, ("num_assistant_tokens", "requests")):
            shared = state["num_assistant_tokens"]
            check_whole("num_assistant_tokens", shared, 1)
            requests = {}
            for request, wanted, output_tokens in state["requests"]:
                known = RequestContext(**{**request, "sources": tuple(request["sources"])})
                check_whole("num_assistant_tokens", wanted, 1)
                requests[known] = (int(wanted), int(output_tokens))
        self._shared, self._requests = shared, requests
        self._last = next(reversed(requests), None)


def _next(wanted: int, is_whole: bool) -> int:
    return wanted + 2 if is_whole else max(1, wanted - 1)
