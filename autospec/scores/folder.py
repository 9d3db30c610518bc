"""Scores on the disk: a file of frames that carry checksums, and a description of what they were made with."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autospec.errors import AutospecError, ConfigurationError
from autospec.files import replacing
from autospec.scores.scored import DraftScores, OfferScores, ScoredRequest
from autospec.traffic.shards import encode, frames

FORMAT = 1
NAME = "scores.json"
FILE = "scores.jsonl.zst"
DIGITS = 5


class ScoreFolder:
    """Appends scored requests, and reads them in the order in which the requests arrived.

    Args:
        path: of the folder, made if missing.
        made_with: target, tokenizer, draft sources with their settings and sampling, as plain JSON values.

    Raises:
        ConfigurationError: the folder holds scores that were made with something else, or no scores at all.
        AutospecError: it cannot be written.
    """

    def __init__(self, path: str | Path, made_with: Mapping[str, Any] | None = None) -> None:
        self.path = Path(path)
        known = self._description()
        if known is None and made_with is None:
            raise ConfigurationError(f"{self.path} holds no scores (no {NAME})")
        if known is None:
            known = {"format": FORMAT, "made_with": dict(made_with or {})}
            self._write_description(known)
        self.made_with: Mapping[str, Any] = known["made_with"]
        if made_with is not None and json.loads(json.dumps(dict(made_with))) != self.made_with:
            differing = sorted(
                key for key in {*made_with, *self.made_with} if made_with.get(key) != self.made_with.get(key)
            )
            raise ConfigurationError(
                f"{self.path} holds scores that were made with other settings ({', '.join(differing)}): "
                "give another folder for scores"
            )
        self.num_damaged = 0

    def add(self, scored: ScoredRequest) -> None:
        """Append one; all of it is with the operating system when this returns."""
        frame = encode(_to_json(scored))
        try:
            descriptor = os.open(self.path / FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                size = os.fstat(descriptor).st_size
                if os.write(descriptor, frame) < len(frame):
                    os.ftruncate(descriptor, size)
                    raise AutospecError(f"{self.path / FILE} could not be written: the disk is full")
            finally:
                os.close(descriptor)
        except OSError as error:
            raise AutospecError(f"{self.path / FILE}: {error.strerror or type(error).__name__}") from error

    def read(self) -> list[ScoredRequest]:
        """All of them, the first to arrive first; of several with one id the last. Damaged parts are counted."""
        found = {scored.request_id: scored for scored in self._stored()}
        return sorted(found.values(), key=lambda scored: (scored.started_at, scored.turn, scored.request_id))

    def done(self) -> set[str]:
        """Ids of the requests that are scored."""
        return {scored.request_id for scored in self._stored()}

    @property
    def damage(self) -> str | None:
        """One line about what could not be read the last time; None where all could.

        Requests in it are not in `done`, and so are scored again by whoever goes on.
        """
        if not self.num_damaged:
            return None
        parts = "1 damaged part" if self.num_damaged == 1 else f"{self.num_damaged} damaged parts"
        return f"{parts} of {self.path / FILE} left out; their requests were scored again"

    def _stored(self) -> Iterator[ScoredRequest]:
        self.num_damaged = 0
        try:
            data = (self.path / FILE).read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise AutospecError(f"{self.path / FILE}: {error.strerror or type(error).__name__}") from error
        for frame in frames(memoryview(data)):
            try:
                if frame.content is None:
                    raise ValueError(frame.reason)
                scored = _from_json(json.loads(frame.content))
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
                self.num_damaged += 1
                continue
            yield scored

    def _description(self) -> dict[str, Any] | None:
        path = self.path / NAME
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise ConfigurationError(f"{path}: {error.strerror or type(error).__name__}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(f"{path} is damaged ({error}): give another folder") from error
        if not isinstance(content, dict) or not isinstance(content.get("made_with"), dict):
            raise ConfigurationError(f"{path} is damaged: give another folder")
        if content.get("format") != FORMAT:
            raise ConfigurationError(f"{path} has format {content.get('format')}, this autospec knows {FORMAT}")
        return content

    def _write_description(self, content: Mapping[str, Any]) -> None:
        path = self.path / NAME
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            with replacing(path) as partial:
                partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise AutospecError(f"{path}: {error.strerror or type(error).__name__}") from error


def _to_json(scored: ScoredRequest) -> dict[str, Any]:
    content = {each.name: getattr(scored, each.name) for each in fields(scored)}
    content["started_at"] = scored.started_at.astimezone(UTC).isoformat()
    content["drafts"] = {name: _columns(asdict(each)) for name, each in scored.drafts.items()}
    content["offers"] = {name: _columns(asdict(each)) for name, each in scored.offers.items()}
    return content


def _columns(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: [round(float(value), DIGITS) for value in column]
        if isinstance(column, np.ndarray) and column.dtype.kind == "f"
        else column.tolist()
        if isinstance(column, np.ndarray)
        else [list(row) for row in column]
        for name, column in values.items()
    }


def _from_json(content: Mapping[str, Any]) -> ScoredRequest:
    length = int(content["output_tokens"])
    drafts = {
        str(name): DraftScores(
            _floats(each["accept"], length, 0.0, 1.0),
            _floats(each["margin"], length, 0.0, 1.0),
            _floats(each["entropy"], length, -1e-3, 1e3),
            _whole(each["rank"], length),
        )
        for name, each in content["drafts"].items()
    }
    offers = {
        str(name): OfferScores(
            _whole(each["num_tokens"], length),
            _whole(each["num_right"], length),
            _whole(each["match_length"], length),
            tuple(tuple(float(score) for score in row) for row in each["scores"]),
        )
        for name, each in content["offers"].items()
    }
    if any(len(each.scores) != length or (each.num_right > each.num_tokens).any() for each in offers.values()):
        raise ValueError("offers that contradict each other")
    prefill = content["prefill_seconds"]
    return ScoredRequest(
        request_id=str(content["request_id"]),
        started_at=datetime.fromisoformat(content["started_at"]),
        segment=str(content["segment"]),
        prompt_tokens=int(content["prompt_tokens"]),
        output_tokens=length,
        max_new_tokens=int(content["max_new_tokens"]),
        do_sample=bool(content["do_sample"]),
        temperature=float(content["temperature"]),
        drafts=drafts,
        offers=offers,
        conversation=None if content["conversation"] is None else str(content["conversation"]),
        turn=int(content.get("turn", 0)),
        prefill_seconds=None if prefill is None else float(prefill),
    )


def _floats(values: Any, length: int, low: float, high: float) -> NDArray[np.float32]:
    array = np.array(values, dtype=np.float32)
    if array.shape != (length,) or not ((array >= low) & (array <= high)).all():
        raise ValueError("numbers of another length, or out of range")
    return array


def _whole(values: Any, length: int) -> NDArray[np.int16]:
    array = np.array(values, dtype=np.int16)
    if array.shape != (length,) or (array < 0).any():
        raise ValueError("counts of another length, or out of range")
    return array
