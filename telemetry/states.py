"""Learned states of policies: as rows, as bytes, and which of them say something that no newer one says already."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from autospec.errors import ConfigurationError
from autospec.telemetry.schema import PolicyStateRow, from_microseconds, to_microseconds
from autospec.types import Deployment, PolicyState


def family(deployment: Deployment) -> str:
    """sha256 of what must agree for a state to be resumed: device, target, dtype, drafts, weights' bytes and backend.

    Acceptance follows from the target, its dtype and the drafts, and what pays from the device; the bytes tell two
    assistants apart, whose names are not in the deployment. What pays under prepared forwards does not under the
    models' own; a deployment that names no backend runs those. The host is left out, so that a fleet of like machines
    shares what it learns and a container that is moved goes on; library versions are left out, since a release changes
    none of these by much, and what it does change, discounting forgets within some fifty blocks.
    """
    content = [
        deployment.device,
        deployment.target,
        deployment.dtype,
        sorted(deployment.drafts),
        deployment.model_bytes,
    ]
    if backend := deployment.versions.get("backend"):
        content.append(backend)
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def pack(state: Mapping[str, Any]) -> bytes:
    """JSON, compressed. The order of keys is kept: policies list the segments seen last at the end.

    Raises:
        ConfigurationError: these are no plain JSON values, or one is no finite number.
    """
    try:
        text = json.dumps(state, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"a policy's state must be plain JSON values: {error}") from error
    return zlib.compress(text.encode("ascii"), 6)


def unpack(data: bytes) -> dict[str, Any]:
    """The state in a row.

    Raises:
        ValueError: it is damaged.
    """
    try:
        state = json.loads(zlib.decompress(data))
    except (zlib.error, RecursionError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(state, dict):
        raise ValueError(f"{type(state).__name__} is no state")
    return state


def to_row(item: PolicyState) -> dict[str, Any]:
    """The row of a state in plain JSON values, without its deployment.

    Raises:
        ConfigurationError: the state cannot be stored.
    """
    if not isinstance(item.state, Mapping):
        raise ConfigurationError(f"policy {item.policy!r}: its state is {type(item.state).__name__}, not a mapping")
    return {
        "family": family(item.deployment),
        "version": item.version,
        "process": item.process,
        "policy": item.policy,
        "updated_at": to_microseconds(item.updated_at),
        "inherited": {process: to_microseconds(when) for process, when in item.inherited.items()},
        "state": base64.b64encode(pack(item.state)).decode("ascii"),
    }


def from_row(row: PolicyStateRow, deployment: Deployment) -> PolicyState:
    """Raises: ValueError: it is damaged."""
    try:
        inherited = {str(process): from_microseconds(when) for process, when in row.inherited.items()}
    except (AttributeError, TypeError, OverflowError) as error:
        raise ValueError(str(error)) from error
    return PolicyState(
        deployment, row.policy, row.version, row.process, row.updated_at, unpack(bytes(row.state)), inherited
    )


def heads(states: Sequence[PolicyState]) -> list[PolicyState]:
    """Those that no other one has taken over as they are, in the same order."""
    return [
        state
        for state in states
        if not any(
            state.updated_at <= other.inherited[state.process]
            for other in states
            if other is not state and state.process in other.inherited
        )
    ]
