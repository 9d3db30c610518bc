"""A tuned policy's file and the model that it is loaded for: draft sources that it brings, and what has changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from autospec.costs.fingerprint import describe, digest
from autospec.drafts.base import DraftSource
from autospec.drafts.registry import BY_NAME
from autospec.errors import ConfigurationError
from autospec.policies.base import Unmeasured
from autospec.policies.registry import build_policy
from autospec.policies.tuned import Tuned, make_tuned, read_contents

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_HEAD = "tuned:"


def drafts_with(policy: object, drafts: Iterable[str | DraftSource]) -> list[str | DraftSource]:
    """Draft sources, and with them those that a tuned policy's file tells how to make.

    Args:
        policy: as `wrap` takes it; anything but `tuned:FILE` brings none.
        drafts: as `wrap` takes them. A name that the file knows is made as the file says; an object is taken as it is.

    Raises:
        ConfigurationError: the file cannot be used, or says a source or a setting that there is not.
    """
    given: list[str | DraftSource] = (
        [drafts] if isinstance(drafts, str) or not isinstance(drafts, Iterable) else list(drafts)
    )
    if not isinstance(policy, str) or not policy.startswith(_HEAD):
        return given
    file = policy.removeprefix(_HEAD)
    origin = f"policy file {file}"
    contents = read_contents(file)
    tuned = make_tuned(contents, lambda name, settings: build_policy(name, settings, Unmeasured), origin=origin)
    objects = [each for each in given if not isinstance(each, str)]
    taken = {getattr(each, "name", None) for each in objects}
    made = [
        make_draft(name, draft["source"], draft.get("settings", {}), origin)
        for name, draft in tuned.drafts.items()
        if name not in taken
    ]
    return [*objects, *(each for each in given if isinstance(each, str) and each not in tuned.drafts), *made]


def make_draft(name: str, source: str, settings: Mapping[str, Any], origin: str) -> DraftSource:
    """A draft source that needs no model, under a name of its own.

    Raises:
        ConfigurationError: no such source, or not with these settings.
    """
    make: Any = BY_NAME.get(source)
    if make is None:
        raise ConfigurationError(f"{origin}: drafts.{name}: source: known are {', '.join(BY_NAME)}, not {source!r:.60}")
    try:
        made: DraftSource = make(**settings)
    except (TypeError, ConfigurationError) as error:
        raise ConfigurationError(f"{origin}: drafts.{name}: {error}") from error
    if made.name != name:
        made.name = name
    return made


def made_for(model: PreTrainedModel, sources: Mapping[str, DraftSource]) -> dict[str, Any]:
    """What a tuned policy is good for, as plain values of its file."""
    found = describe(model, sources)
    return {
        "target": found["target"],
        "device": found["device"],
        "threads": found["threads"],
        "drafts": {name: digest(settings) for name, settings in found["sources"].items()},
        "versions": {name: found[name] for name in ("torch", "transformers")},
    }


def differences(policy: Tuned, model: PreTrainedModel, sources: Mapping[str, DraftSource]) -> Iterator[str]:
    """In what the model, its device and its draft sources differ from those that a policy was tuned with."""
    made: Any = policy.settings.get("made", {})
    here = made_for(model, sources)
    known = made.get("target")
    if isinstance(known, Mapping):
        changed = [name for name, value in here["target"].items() if name in known and known[name] != value]
        if changed:
            yield f"target ({', '.join(f'{name} {known[name]!s:.40}' for name in changed)})"
    for name in ("device", "threads"):
        if name in made and made[name] != here[name]:
            yield f"{name} {made[name]!s:.60}"
    drafts = made.get("drafts")
    if isinstance(drafts, Mapping):
        other = [name for name, value in here["drafts"].items() if name in drafts and drafts[name] != value]
        if other:
            yield f"other settings of {', '.join(sorted(other))}"
