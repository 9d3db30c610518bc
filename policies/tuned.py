"""A policy for each segment, as `autospec tune` found it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from autospec.errors import ConfigurationError
from autospec.policies.base import Policy, asked
from autospec.policies.reading import reading_state
from autospec.policies.scoped import Scoped
from autospec.types import Action, BlockContext, BlockOutcome, RequestContext

FORMAT = "autospec-policy"
VERSION = 1
PRESETS = Path(__file__).parent / "presets"
_FIELDS = {"format", "version", "default", "segments", "drafts", "made"}
_FIXED = {"source", "block_length", "least_margin", "most_entropy"}
_BUILT = {"policy", "settings", "sources", "pooled"}

Build = Callable[[str, Mapping[str, Any]], Policy]
"""From a policy's name and settings to the policy."""


class Tuned:
    """Leaves each segment to its own policy, and every other segment to the default.

    Segments with equal parts in `contents` share one policy, which learns from all of them.

    Args:
        default: chooses for segments that have no policy of their own.
        segments: policies by segment.
        contents: what both were made from, see `read_tuned`.
    """

    name = "tuned"

    def __init__(self, default: Policy, segments: Mapping[str, Policy], contents: Mapping[str, Any]) -> None:
        self.default = default
        self.segments = dict(segments)
        self.settings: dict[str, object] = dict(contents)
        self.wants_offers = any(getattr(policy, "wants_offers", False) for _, policy in self.parts())
        widths = [width for _, policy in self.parts() if (width := getattr(policy, "verify_width", None)) is not None]
        if widths:  # costs are of the device, and the same for all that know them
            self.verify_width = widths[0]

    def parts(self) -> Iterator[tuple[str, Policy]]:
        """Each policy inside once, with the field of the file that says it first."""
        named = [("default", self.default), *((f"segments.{name}", policy) for name, policy in self.segments.items())]
        known: set[int] = set()
        for field, policy in named:
            if id(policy) not in known:
                known.add(id(policy))
                yield field, policy

    @property
    def drafts(self) -> Mapping[str, Mapping[str, Any]]:
        """Draft sources that the file knows how to make, by name: `source` and `settings`."""
        found: Mapping[str, Mapping[str, Any]] = self.settings.get("drafts", {})  # type: ignore[assignment]
        return found

    def asks(self, segment: str, sources: Collection[str]) -> Collection[str]:
        return asked(self._of(segment), segment, sources)

    def is_control(self, request: RequestContext) -> bool:
        takes = getattr(self._of(request.segment), "is_control", None)
        return bool(takes(request)) if takes is not None else False

    def choose(self, context: BlockContext) -> Action:
        return self._of(context.segment).choose(context)

    def observe(self, outcome: BlockOutcome) -> None:
        self._of(outcome.segment).observe(outcome)

    def _of(self, segment: str) -> Policy:
        return self.segments.get(segment, self.default)

    def state(self) -> dict[str, Any]:
        """What the policies inside have learned, as plain JSON values."""
        return {
            "parts": [
                [field, learned() if (learned := getattr(policy, "state", None)) is not None else None]
                for field, policy in self.parts()
            ]
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what the policies of another one had learned.

        Raises:
            ConfigurationError: this is no such state, or that of a policy with other segments.
        """
        with reading_state(self.name, state, ("parts",)):
            learned = dict(state["parts"])
            learning = {field for field, policy in self.parts() if hasattr(policy, "restore")}
            if set(learned) != {field for field, _ in self.parts()}:
                raise ValueError(f"it is of {', '.join(learned)}")
            if learning != {field for field, part in learned.items() if part is not None}:
                raise ValueError(f"{', '.join(sorted(learning)) or 'nothing'} learns here")
        for field, policy in self.parts():
            if (restore := getattr(policy, "restore", None)) is not None:
                restore(learned[field])


def policy_file(name: str | Path) -> Path:
    """Where a policy is: a file, or one of those that come with autospec, by its name without `.toml`."""
    preset = PRESETS / f"{name}.toml"
    return preset if preset.parent == PRESETS and preset.is_file() and not Path(name).exists() else Path(name)


def presets() -> list[str]:
    """Names of the policies that come with autospec."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def read_tuned(file: str | Path, build: Build) -> Tuned:
    """The policy in a file: TOML where its name ends in `.toml`, JSON elsewhere.

    The file holds `format`, `version`, `default` and, where there is need, `segments` (by segment), `drafts` (sources
    by name, with their settings) and `made` (how it came about). A policy is either `{"source": ..., "block_length":
    ...}`, with `least_margin` and `most_entropy` where blocks end earlier, or `{"policy": name, "settings": {...}}`,
    with `sources` where it may use some of them alone, and `pooled` where all its segments are one to it.

    Raises:
        ConfigurationError: the file cannot be read or is no such file; it names the file and the field.
    """
    return make_tuned(read_contents(file), build, origin=f"policy file {file}")


def read_contents(file: str | Path) -> Any:
    """What a policy file says, not looked at any further.

    Raises:
        ConfigurationError: the file cannot be read, or is neither TOML nor JSON as its name says.
    """
    file = policy_file(file)
    is_toml = file.suffix.lower() == ".toml"
    try:
        text = file.read_text(encoding="utf-8")
        return tomllib.loads(text) if is_toml else json.loads(text)
    except OSError as error:
        known = (
            f" (policies that come with autospec: {', '.join(presets())})"
            if isinstance(error, FileNotFoundError)
            else ""
        )
        raise ConfigurationError(f"policy file {file}: {error.strerror or error}{known}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"policy file {file}: no {'TOML' if is_toml else 'JSON'}: {error}") from error


def make_tuned(contents: Any, build: Build, *, origin: str = "tuned policy") -> Tuned:
    """The policy that such a file's contents say. Args: origin: what messages begin with.

    Raises:
        ConfigurationError: they are not such contents.
    """
    if not isinstance(contents, Mapping):
        raise ConfigurationError(f"{origin}: an object is needed, not {type(contents).__name__}")
    if unknown := sorted(set(map(str, contents)) - _FIELDS):
        raise ConfigurationError(f"{origin}: unknown field {unknown[0]!r}: known are {', '.join(sorted(_FIELDS))}")
    if contents.get("format") != FORMAT:
        raise ConfigurationError(f"{origin}: format: {FORMAT!r} is needed, not {contents.get('format')!r}")
    version = contents.get("version")
    if type(version) is not int or version != VERSION:
        raise ConfigurationError(f"{origin}: version: this autospec reads version {VERSION}, not {version!r}")
    for field in ("segments", "drafts", "made"):
        if not isinstance(contents.get(field, {}), Mapping):
            raise ConfigurationError(f"{origin}: {field}: an object is needed, not {contents[field]!r:.60}")
    if "default" not in contents:
        raise ConfigurationError(f"{origin}: default: it is missing")
    _check_drafts(contents.get("drafts", {}), origin)
    made: dict[str, Policy] = {}

    def policy_of(part: Any, where: str) -> Policy:
        key = json.dumps(part, sort_keys=True, default=str)
        if key not in made:
            made[key] = make_part(part, build, where)
        return made[key]

    default = policy_of(contents["default"], f"{origin}: default")
    segments = {
        segment: policy_of(part, f"{origin}: segments.{segment}")
        for segment, part in contents.get("segments", {}).items()
    }
    return Tuned(default, segments, contents)


def _check_drafts(drafts: Mapping[str, Any], origin: str) -> None:
    for name, draft in drafts.items():
        is_one = isinstance(draft, Mapping) and {"source"} <= set(draft) <= {"source", "settings"}
        if not is_one or not isinstance(draft["source"], str) or not isinstance(draft.get("settings", {}), Mapping):
            raise ConfigurationError(
                f'{origin}: drafts.{name}: {{"source": ..., "settings": {{...}}}} is needed, not {draft!r:.80}'
            )


def make_part(part: Any, build: Build, where: str) -> Policy:
    """One segment's policy. Args: where: what messages begin with.

    Raises:
        ConfigurationError: it is no such part.
    """
    is_fixed = isinstance(part, Mapping) and {"source", "block_length"} <= set(part) <= _FIXED
    if not isinstance(part, Mapping) or not (is_fixed or "policy" in part):
        raise ConfigurationError(
            f'{where}: {{"source": ..., "block_length": ...}} or {{"policy": ..., "settings": {{...}}}} is needed, '
            f"not {part!r:.80}"
        )
    if is_fixed:
        name, settings = "fixed", dict(part)
    else:
        name, settings = part["policy"], part.get("settings", {})
        if unknown := sorted(set(part) - _BUILT):
            raise ConfigurationError(f"{where}: unknown field {unknown[0]!r}: known are {', '.join(sorted(_BUILT))}")
        if name == Tuned.name:
            raise ConfigurationError(f"{where}: policy: a tuned policy cannot be inside another one")
    if name == "guard" and isinstance(settings, Mapping):
        settings = {"seed": None, **settings}  # each process draws its controls anew, unless the file says how
    try:
        policy = build(name, settings)
        if part.keys() & {"sources", "pooled"}:
            policy = Scoped(policy, part.get("sources"), pooled=part.get("pooled", False))
        return policy
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from error
