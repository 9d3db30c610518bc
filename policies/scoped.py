"""A policy that sees part of what there is: some of the draft sources, or all segments as one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from autospec.errors import ConfigurationError
from autospec.policies.base import Policy, asked
from autospec.types import Action, BlockContext, BlockOutcome, RequestContext

POOL = "pooled"
"""What segments are called that are one to a policy."""


class Scoped:
    """Narrows what another policy is told; in all else it is that policy.

    Args:
        policy: chooses.
        sources: names of the draft sources that it may use; None: all.
        pooled: whether all segments are one to it, so that it learns from them together.

    Raises:
        ConfigurationError: the sources are no names, or none.
    """

    def __init__(self, policy: Policy, sources: Collection[str] | None = None, *, pooled: bool = False) -> None:
        if sources is not None:
            is_listed = isinstance(sources, (list, tuple, set, frozenset))
            if not is_listed or not sources or not all(isinstance(name, str) for name in sources):
                raise ConfigurationError(f"sources={sources!r:.60}: names of draft sources are needed, at least one")
            sources = frozenset(sources)
        if not isinstance(pooled, bool):
            raise ConfigurationError(f"pooled={pooled!r:.60}: True or False is needed")
        self.policy = policy
        self.sources = sources
        self.pooled = pooled
        self.name = policy.name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "policy":  # a copy that is being made has nothing yet
            raise AttributeError(name)
        return getattr(self.policy, name)

    def is_control(self, request: RequestContext) -> bool:
        takes = getattr(self.policy, "is_control", None)
        return takes is not None and bool(takes(self._request(request)))

    def choose(self, context: BlockContext) -> Action:
        return self.policy.choose(
            replace(
                context,
                request=self._request(context.request),
                sources=self._known(context.sources),
                offers={name: offer for name, offer in context.offers.items() if self._is_known(name)},
                backlogs={name: tokens for name, tokens in context.backlogs.items() if self._is_known(name)},
            )
        )

    def observe(self, outcome: BlockOutcome) -> None:
        self.policy.observe(
            replace(
                outcome,
                segment=self._segment(outcome.segment),
                request=None if outcome.request is None else self._request(outcome.request),
                offers=tuple(each for each in outcome.offers if self._is_known(each.source)),
            )
        )

    def asks(self, segment: str, sources: Collection[str]) -> Collection[str]:
        known = [name for name in sources if self._is_known(name)]
        return asked(self.policy, self._segment(segment), known)

    def _request(self, request: RequestContext) -> RequestContext:
        return replace(request, segment=self._segment(request.segment), sources=self._known(request.sources))

    def _segment(self, segment: str) -> str:
        return POOL if self.pooled else segment

    def _known(self, sources: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(filter(self._is_known, sources))

    def _is_known(self, source: str) -> bool:
        return self.sources is None or source in self.sources
