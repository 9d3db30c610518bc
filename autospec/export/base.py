"""What a runtime is given, and what all of them have in common."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autospec.drafts.ngram import NGram
from autospec.errors import ConfigurationError
from autospec.export.chosen import Chosen

Value = str | int | float | bool | list[list[int]]

ONE_SEQUENCE = "tuned for one sequence at a time: measure it at the load that the server has"
FIRST, NEWEST = "the first", "the newest"
"""Of several matches, the one that a runtime copies after."""
_OWN = {"frequent": "the first with the most frequent continuation", "newest": NEWEST}


@dataclass(frozen=True, slots=True)
class Options:
    """What no policy file holds."""

    assistant: str | None = None  # the small model, as the runtime is to find it
    early_exit: int | None = None  # layers that draft
    schedule: tuple[tuple[int, int, int], ...] | None = None  # first and last batch size, draft tokens


@dataclass(frozen=True, slots=True)
class Exported:
    """Of one runtime."""

    settings: Mapping[str, Value]  # by key or flag, as its documentation has them
    text: str  # the same as it is written; empty: nothing is to be given
    use: str  # where that goes
    limits: tuple[str, ...]  # what will be otherwise than under the policy


def as_json(settings: Mapping[str, Value], indent: int | None = None) -> str:
    return json.dumps(dict(settings), indent=indent)


def as_flags(settings: Mapping[str, Value]) -> str:
    """One line for a shell."""
    return shlex.join(str(word) for setting in settings.items() for word in setting)


def named_assistant(chosen: Chosen, options: Options) -> str:
    """Raises: ConfigurationError: the model is not named."""
    if not options.assistant:
        raise ConfigurationError(
            f"draft source {chosen.name!r} is a model of your own, which the file does not name: give --assistant"
        )
    return options.assistant


def not_used(options: Options, *used: str) -> Iterator[str]:
    """A line for each option that was given and is no use. Args: used: names of those that are."""
    for name, value in (("assistant", options.assistant), ("early_exit", options.early_exit)):
        if value is not None and name not in used:
            yield f"--{name.replace('_', '-')} {value} is not used"


def ngram_limits(draft: NGram, copied: str) -> Iterator[str]:
    """What of `ngram` other implementations of prompt lookup leave out. Args: copied: `FIRST` or `NEWEST`."""
    if copied != _OWN[draft.continuation]:
        yield f"of several matches the runtime copies after {copied}, autospec after {_OWN[draft.continuation]}"
    if draft.tokens_per_match is not None:
        yield f"drafts are not bounded by the length of the match (tokens_per_match={draft.tokens_per_match})"


def refusal(runtime: str, chosen: Chosen, nearest: Mapping[str, str]) -> ConfigurationError:
    """Args: nearest: by source, what comes closest."""
    known = nearest.get(chosen.source, "it is none of autospec's own: export a policy of another source")
    return ConfigurationError(f"{runtime} cannot be told to draft by {chosen.name!r}: {known}")
