"""The one action of a tuned policy that a runtime can be given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autospec.drafts.base import DraftSource
from autospec.errors import ConfigurationError
from autospec.policies.base import Policy, Unmeasured
from autospec.policies.fixed import Fixed
from autospec.policies.registry import build_policy
from autospec.policies.scoped import Scoped
from autospec.policies.tuned import Tuned, make_part, make_tuned, read_contents
from autospec.tune.variants import draft_table
from autospec.tuned_files import make_draft
from autospec.types import NONE

_MOST_NAMES = 5  # of segments, in a line


@dataclass(frozen=True, slots=True)
class Chosen:
    """A fixed action."""

    name: str  # its draft source, as the policy calls it
    source: str  # what kind of source that is, as in `ngram`
    block_length: int  # 0: plain decoding
    field: str  # of the file, that says it
    draft: DraftSource | None = None  # retrieval, as the file has it made; models are in no file
    limits: tuple[str, ...] = ()  # what no runtime takes over from the policy

    @property
    def label(self) -> str:
        """As in `ngram:4`."""
        return f"{self.name}:{self.block_length}" if self.block_length else "plain decoding"


def choose(file: str | Path, segment: str | None = None) -> Chosen:
    """What all traffic is to get: a segment's own action, or the default's.

    Where that is decided block by block, the best fixed action that the file knows stands for it.

    Args:
        file: of a tuned policy.
        segment: whose action; None: the default's.

    Raises:
        ConfigurationError: the file cannot be used, does not know the segment, or knows no fixed action.
    """
    origin = f"policy file {file}"
    contents = read_contents(file)
    tuned = make_tuned(contents, _build, origin=origin)
    made = contents.get("made", {})
    by_segment = made.get("best_fixed_by_segment", {})
    if not isinstance(by_segment, Mapping):
        raise ConfigurationError(f"{origin}: made.best_fixed_by_segment: an object is needed, not {by_segment!r:.60}")
    known = sorted({*tuned.segments, *by_segment})
    if segment is not None and segment not in known:
        names = f"known are {', '.join(known)}" if known else "it has none, leave --segment out"
        raise ConfigurationError(f"{origin}: no segment {segment!r}: {names}")
    field, policy = "default", tuned.default
    if segment is not None and segment in tuned.segments:
        field, policy = f"segments.{segment}", tuned.segments[segment]
    limits = list(_left_out(tuned, policy, segment))
    fixed = _fixed(policy)
    if fixed is None:
        where, part = _best_fixed(made, by_segment, segment)
        if part is None:
            raise ConfigurationError(
                f"{origin}: {field} is policy {policy.name!r}, which decides block by block, and the file knows no "
                "best fixed action (made.best_fixed): make it anew with autospec tune"
            )
        fixed = _fixed(make_part(part, _build, f"{origin}: {where}"))
        if fixed is None:
            raise ConfigurationError(f"{origin}: {where}: a fixed action is needed, not {part!r:.80}")
        limits.append(
            f"{field} is policy {policy.name!r}, which decides block by block: exported is the best fixed action that "
            f"the file knows ({where}), which does not adapt and takes no controls"
        )
        field = where
    if not fixed.block_length:
        return Chosen(NONE, NONE, 0, field, limits=tuple(limits))
    if fixed.least_margin or fixed.most_entropy is not None:
        limits.append("blocks do not end where the draft is unsure (least_margin, most_entropy): all have full length")
    source, draft = _draft(tuned, fixed.source, origin)
    return Chosen(fixed.source, source, fixed.block_length, field, draft, tuple(limits))


def _build(name: str, settings: Mapping[str, Any]) -> Policy:
    return build_policy(name, settings, Unmeasured)  # none of them will choose


def _fixed(policy: Policy) -> Fixed | None:
    inner = policy.policy if isinstance(policy, Scoped) else policy
    return inner if isinstance(inner, Fixed) else None


def _best_fixed(made: Mapping[str, Any], by_segment: Mapping[str, Any], segment: str | None) -> tuple[str, Any]:
    """The field that says it, and the part."""
    if segment is not None and segment in by_segment:
        return f"made.best_fixed_by_segment.{segment}", by_segment[segment]
    return "made.best_fixed" + (", of all traffic" if segment is not None else ""), made.get("best_fixed")


def _left_out(tuned: Tuned, policy: Policy, segment: str | None) -> Iterator[str]:
    others = [name for name, other in tuned.segments.items() if other is not policy]
    if segment is not None and (others or tuned.default is not policy):
        yield f"a runtime has one setting: what segment {segment!r} has goes to all traffic"
    elif others:
        named = ", ".join(map(repr, others[:_MOST_NAMES])) + (", ..." if len(others) > _MOST_NAMES else "")
        yield f"a runtime has one setting: segments with a policy of their own get the default's too ({named})"


def _draft(tuned: Tuned, name: str, origin: str) -> tuple[str, DraftSource | None]:
    """What kind of source it is, and retrieval as it is to be made."""
    made = {**draft_table({name}), **tuned.drafts}.get(name)
    if made is None:
        return name, None
    return made["source"], make_draft(name, made["source"], made.get("settings", {}), origin)
