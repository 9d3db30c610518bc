"""Rules: which prompts go to which segment, the first that fits."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autospec.errors import ConfigurationError
from autospec.segments.labels import clean
from autospec.segments.prompts import Prompt

CONDITIONS = ("text", "min_prompt_tokens", "max_prompt_tokens", "do_sample", "decoding", "tenant")
_PATTERNS = ("tenant", "decoding", "text")  # the text last: it has to be decoded
BUDGET_SECONDS = 0.02
"""For the patterns of all rules on one prompt. One that does not end within it does not fit."""

_log = logging.getLogger("autospec")


@dataclass(frozen=True, slots=True)
class Rule:
    """A segment, and what a prompt must have to be in it: all that is given here.

    Args:
        name: the segment.
        text: a regular expression found anywhere in the excerpt of the prompt (special tokens included).
        min_prompt_tokens, max_prompt_tokens: both included.
        do_sample: sampled, or greedy.
        decoding: a regular expression on how tokens are chosen, as in `sample temperature=0.8 top_p=0.95`.
        tenant: a regular expression on the name given by `autospec.tenant`; a request without one never fits.

    Raises:
        ConfigurationError: a value that cannot be used, or no condition.
    """

    name: str
    text: str | None = None
    min_prompt_tokens: int | None = None
    max_prompt_tokens: int | None = None
    do_sample: bool | None = None
    decoding: str | None = None
    tenant: str | None = None
    _patterns: Mapping[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", clean(self.name, "name"))
        for key in ("min_prompt_tokens", "max_prompt_tokens"):
            value = getattr(self, key)
            if value is not None and (type(value) is not int or value < 0):
                raise ConfigurationError(f"{key}={value!r}: a whole number from 0 up is needed")
        if self.do_sample is not None and not isinstance(self.do_sample, bool):
            raise ConfigurationError(f"do_sample={self.do_sample!r}: true or false is needed")
        if all(getattr(self, key) is None for key in CONDITIONS):
            raise ConfigurationError(
                f"it takes every prompt: give one of {', '.join(CONDITIONS)} (min_prompt_tokens = 0 takes all)"
            )
        patterns = {key: _compiled(key, getattr(self, key)) for key in _PATTERNS}
        object.__setattr__(self, "_patterns", {key: pattern for key, pattern in patterns.items() if pattern})

    def fits(self, prompt: Prompt, budget: Budget) -> bool:
        """Whether the prompt has all that the rule asks for.

        Raises:
            TimeoutError: a pattern did not end within the budget.
        """
        tokens = prompt.prompt_tokens
        if self.min_prompt_tokens is not None and tokens < self.min_prompt_tokens:
            return False
        if self.max_prompt_tokens is not None and tokens > self.max_prompt_tokens:
            return False
        if self.do_sample is not None and prompt.do_sample != self.do_sample:
            return False
        return all(budget.finds(pattern, getattr(prompt, key)) for key, pattern in self._patterns.items())

    def __str__(self) -> str:
        """The conditions, as they stand in the file."""
        given = ((key, getattr(self, key)) for key in CONDITIONS)
        return ", ".join(f"{key} = {value!r}" for key, value in given if value is not None)


class Budget:
    """Seconds that patterns may still take on one prompt.

    Args:
        seconds: in all.
        share: what each pattern has even when nothing is left, so that one bad rule does not undo the others.
    """

    def __init__(self, seconds: float, share: float) -> None:
        self._left = seconds
        self._share = share

    def finds(self, pattern: Any, text: str | None) -> bool:
        """Whether a pattern is found.

        Raises:
            TimeoutError: not before its time was over.
        """
        if text is None:
            return False
        started = time.perf_counter()
        try:
            return pattern.search(text, timeout=max(self._left, self._share)) is not None
        finally:
            self._left -= time.perf_counter() - started


class Rules:
    """Rules in their order. Thread-safe.

    Args:
        rules: the first that fits is taken.
        budget_seconds: for the patterns on one prompt. A rule that takes longer is passed over, the first time with a
            warning in the log.
    """

    def __init__(self, rules: Sequence[Rule], *, budget_seconds: float = BUDGET_SECONDS) -> None:
        self.rules = tuple(rules)
        self._budget_seconds = budget_seconds
        self._has_warned = False

    def first(self, prompt: Prompt) -> tuple[int, Rule] | None:
        """The first rule that fits, and its number from 1; None without one."""
        budget = Budget(self._budget_seconds, self._budget_seconds / max(1, len(self.rules)))
        for number, rule in enumerate(self.rules, 1):
            try:
                if rule.fits(prompt, budget):
                    return number, rule
            except TimeoutError:
                if not self._has_warned:
                    self._has_warned = True
                    _log.warning(
                        "segments: rule %d (%s) did not end within %.0f ms on a prompt and was passed over: make its "
                        "pattern simpler",
                        number,
                        rule.name,
                        1000 * self._budget_seconds,
                    )
        return None


def _compiled(key: str, pattern: Any) -> Any | None:
    """With `regex`, which can stop a search that takes too long; `re` cannot."""
    if pattern is None:
        return None
    if not isinstance(pattern, str):
        raise ConfigurationError(f"{key} = {pattern!r}; a regular expression is needed, in quotes")
    import regex

    try:
        return regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise ConfigurationError(
            f"{key} = {pattern!r} is no regular expression ({error}); '...' keeps \\ as it is"
        ) from error
