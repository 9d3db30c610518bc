"""Which segment a request is in: the label given, rules, built-in signs, learned clusters, in this order."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autospec.errors import ConfigurationError
from autospec.forks import renew_after_fork
from autospec.segments.features import OTHER, SEGMENTS, Sign, classify, score, signs
from autospec.segments.labels import DEFAULT, clean, surrounding
from autospec.segments.prompts import Prompt
from autospec.segments.rules import Rule, Rules
from autospec.segments.settings import load_settings

if TYPE_CHECKING:
    from autospec.segments.clusters import Clusters

MAX_SEGMENTS = 1_000
_SHOWN_SIGNS = 6


@dataclass(frozen=True, slots=True)
class Assignment:
    """A segment, what chose it, and why, in words for people."""

    segment: str
    origin: str  # `label`, `block`, `rule`, `built-in`, `cluster` or `default`
    why: str


class Segmenter:
    """Assigns prompts to segments. Thread-safe.

    The order: the label of the call, that of the surrounding `autospec.segment` block, the first rule that fits, the
    built-in signs, the nearest cluster where these say `other`, and `default` when there is nothing to ask.

    Args:
        rules: of a configuration file, or made here.
        builtin: look for built-in signs.
        clusters: from `autospec segments fit`.
        max_segments: bound on the labels that calls may bring; later ones become `other`.

    Raises:
        ConfigurationError: an argument of another kind.
    """

    def __init__(
        self,
        rules: Sequence[Rule] = (),
        *,
        builtin: bool = False,
        clusters: Clusters | None = None,
        max_segments: int = MAX_SEGMENTS,
    ) -> None:
        if not all(isinstance(rule, Rule) for rule in rules):
            raise ConfigurationError("rules: autospec.segments.Rule objects are needed; a file goes to from_file")
        if type(max_segments) is not int or max_segments < 1:
            raise ConfigurationError(f"max_segments={max_segments!r}: a whole number from 1 up is needed")
        self.rules = Rules(rules)
        self.builtin = builtin
        self.clusters = clusters
        self.max_segments = max_segments
        self._own = frozenset(
            [
                DEFAULT,
                OTHER,
                *(rule.name for rule in rules),
                *(SEGMENTS if builtin else ()),
                *(clusters.names if clusters is not None else ()),
            ]
        )
        self._labels: set[str] = set()
        self._lock = threading.Lock()
        renew_after_fork(self)

    @property
    def is_blank(self) -> bool:
        """Whether labels alone tell segments: there is nothing to look for in a prompt."""
        return type(self) is Segmenter and not (self.builtin or self.rules.rules or self.clusters is not None)

    @classmethod
    def from_file(cls, path: str | Path, *, clusters: str | Path | None = None) -> Segmenter:
        """What the table `[segments]` of a TOML file says (docs/segments.md).

        Args:
            path: the file.
            clusters: a file of clusters, in place of the one that is named there.

        Raises:
            ConfigurationError: the file, or the clusters it names, cannot be used.
        """
        settings = load_settings(path)
        return cls(
            settings.rules,
            builtin=settings.builtin,
            clusters=_clusters(clusters or settings.clusters),
            max_segments=settings.max_segments or MAX_SEGMENTS,
        )

    def given(self, label: str | None) -> Assignment | None:
        """By the label of the call or of the surrounding block; None without one.

        Raises:
            ConfigurationError: a label that is no text, or empty.
        """
        if label is not None:
            return self._admitted(Assignment(clean(label), "label", "given with the call"))
        if (around := surrounding()) is not None:
            return self._admitted(Assignment(around, "block", "inside autospec.segment(...)"))
        return None

    def assign(self, prompt: Prompt, label: str | None = None) -> Assignment:
        """The segment of a request.

        Args:
            prompt: looked at only where there is no label.
            label: given with the call.

        Raises:
            ConfigurationError: a label that is no text, or empty.
        """
        return self.given(label) or self.look(prompt)

    def look(self, prompt: Prompt) -> Assignment:
        """The segment of a request without a label."""
        if (hit := self.rules.first(prompt)) is not None:
            number, rule = hit
            return Assignment(rule.name, "rule", f"rule {number}: {rule}")
        found = Assignment(DEFAULT, "default", "no label, and no rule that fits")
        if self.builtin:
            found = _by_signs(prompt)
        if self.clusters is not None and prompt.text and found.segment in (DEFAULT, OTHER):
            return _by_clusters(prompt, self.clusters)
        return found

    def _admitted(self, found: Assignment) -> Assignment:
        """The same, or `other` where there are as many labels as there may be."""
        if found.segment in self._own or found.segment in self._labels:
            return found
        with self._lock:
            if len(self._labels) < self.max_segments or found.segment in self._labels:
                self._labels.add(found.segment)
                return found
        return Assignment(OTHER, found.origin, f"{found.why}, but there are {self.max_segments} labels already")


def _clusters(path: str | Path | None) -> Clusters | None:
    if path is None:
        return None
    from autospec.segments.clusters import Clusters  # loads numpy, and scikit-learn for the first prompt

    return Clusters.load(path)


def _by_signs(prompt: Prompt) -> Assignment:
    found = signs(prompt.text, prompt.prompt_tokens, prompt.decoding)
    return Assignment(classify(found), "built-in", _shown(found))


def _shown(found: Sequence[Sign]) -> str:
    """The scores, and the signs of the winner first."""
    scores = score(found)
    if not scores:
        return "no sign of anything"
    order = list(scores)
    ranked = sorted(found, key=lambda sign: (order.index(sign.segment), -sign.weight))
    listed = ", ".join(f"{sign.what} ({sign.segment} +{sign.weight:g})" for sign in ranked[:_SHOWN_SIGNS])
    more = f", {len(ranked) - _SHOWN_SIGNS} more" if len(ranked) > _SHOWN_SIGNS else ""
    return " ".join(f"{segment} {points:g}" for segment, points in scores.items()) + f": {listed}{more}"


def _by_clusters(prompt: Prompt, clusters: Clusters) -> Assignment:
    distances = clusters.distances(prompt)
    order = distances.argsort()
    nearest = int(order[0])
    why = f"nearest of {len(clusters)} centres, distance {distances[nearest]:.3f}"
    if len(order) > 1:
        why += f" (next {distances[order[1]]:.3f})"
    return Assignment(clusters.names[nearest], "cluster", why)
