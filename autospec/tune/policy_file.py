"""The file of a tuned policy: one readable TOML, with what it was made of."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from autospec.drafts.base import DraftSource
from autospec.errors import AutospecError
from autospec.files import replacing
from autospec.scores.scored import ScoredRequest
from autospec.tune.candidates import Part
from autospec.tune.choice import Choice, can_be_named
from autospec.tune.curves import ALL
from autospec.tuned_files import made_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEADER = """\
# A policy for each segment, made by `autospec tune`.
# autospec.wrap(model, tokenizer=tokenizer, policy="tuned:THIS_FILE")
# makes the draft sources under [drafts]; others that it names, such as an assistant, are to be passed: drafts=[...].

"""


def write_policy(path: Path, contents: Mapping[str, Any]) -> None:
    """Write the file whole, or not at all.

    Args:
        path: ends in `.toml`.
        contents: as `autospec.policies.tuned.make_tuned` takes them.

    Raises:
        AutospecError: it cannot be written.
    """
    write_page(path, HEADER + tomli_w.dumps(_without_none(contents)))


def write_page(path: Path, text: str) -> None:
    """Write a text whole, or not at all.

    Raises:
        AutospecError: it cannot be written.
    """
    try:
        with replacing(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise AutospecError(f"{path}: {error.strerror or type(error).__name__}") from error


def made_by(
    choice: Choice,
    model: PreTrainedModel,
    sources: Mapping[str, DraftSource],
    *,
    requests: Sequence[ScoredRequest],
    best_fixed: Mapping[str, Part],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """How a policy came about, as plain values of its file.

    Args:
        choice: what was chosen.
        model, sources: what it was tuned with.
        requests: all that were walked.
        best_fixed: of each segment, and under `ALL` of all together, the fastest fixed action in training, where known.
        settings: of the search and the split.
    """
    named = {name: dict(part) for name, part in best_fixed.items() if name != ALL and can_be_named(name)}
    return {
        "by": f"autospec tune {version('autospec-decoding')}",
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "traffic": {"requests": len(requests), "digest": digest_of(requests)},
        **made_for(model, sources),
        **settings,
        "speed_up": {
            each.segment: [round(value, 4) for value in (each.held_out.ratio, each.held_out.low, each.held_out.high)]
            for each in choice.segments
            if each.held_out is not None and each.held_out.is_sure and can_be_named(each.segment)
        },
        **({"best_fixed": dict(best_fixed[ALL])} if ALL in best_fixed else {}),
        "best_fixed_by_segment": named,
    }


def digest_of(requests: Sequence[ScoredRequest]) -> str:
    """Which requests these are, 16 hexadecimal digits."""
    text = "\n".join(f"{each.request_id} {each.output_tokens}" for each in requests)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _without_none(value: Any) -> Any:
    """TOML knows no nothing: what is None is left out."""
    if isinstance(value, Mapping):
        return {str(key): _without_none(each) for key, each in value.items() if each is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(each) for each in value]
    return value
