"""What the page on tuning shows: studies of `autospec tune`, and the policy file, beside what was measured since."""

from __future__ import annotations

import importlib.util
import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from autospec.errors import AutospecError, ConfigurationError
from autospec.policies.tuned import FORMAT, Tuned, read_contents
from autospec.telemetry.dashboard.filters import Filters
from autospec.telemetry.dashboard.reports import load_report
from autospec.telemetry.labels import visible
from autospec.telemetry.rows import SegmentRow, ratio
from autospec.telemetry.store import Store
from autospec.types import NONE

JOURNAL = "journal:"
OPTUNA_DASHBOARD = "http://127.0.0.1:8080/dashboard/"
"""Where optuna-dashboard is found unless it is told otherwise."""

DEFAULT = "all others"
MOST_TRIALS = 20
VALUE_COLUMNS = 200

Part = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate that was walked to the end."""

    number: int
    part: Part
    seconds: Mapping[str, tuple[float, float]]  # by segment: under the candidate, and of plain decoding

    @property
    def speed_up(self) -> float | None:
        """Over plain decoding, on the requests that were searched with."""
        return ratio(sum(off for _, off in self.seconds.values()), sum(on for on, _ in self.seconds.values()))

    def speed_up_in(self, segment: str) -> float | None:
        on, off = self.seconds.get(segment, (0.0, 0.0))
        return ratio(off, on)


@dataclass(frozen=True, slots=True)
class Study:
    name: str
    states: Mapping[str, int]  # trials by state, in lower case
    trials: tuple[Trial, ...]  # walked to the end, the fastest first

    @property
    def best(self) -> tuple[Trial, ...]:
        return self.trials[:MOST_TRIALS]


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the policy file says of one segment."""

    segment: str
    part: Part
    train: float | None  # speed-up where a study tried just this
    held_out: tuple[float, float, float] | None  # speed-up and its 95 % interval
    measured: SegmentRow | None  # of requests under a tuned policy


@dataclass(frozen=True, slots=True)
class Tuning:
    studies: tuple[Study, ...]
    storage: str | None  # as it may be shown
    policy_file: str | None
    chosen: tuple[Chosen, ...]
    made: tuple[tuple[str, str], ...]  # how the policy came about
    has_optuna_dashboard: bool

    @property
    def command(self) -> str:
        """Shows every trial of the storage, where optuna-dashboard is installed."""
        return f"optuna-dashboard {shlex.quote((self.storage or '').removeprefix(JOURNAL))}"


def load_tuning(store: Store, study_storage: str | None, policy_file: Path | None) -> Tuning:
    """Studies and policy file, read anew.

    Args:
        store: for what was measured under a tuned policy since.
        study_storage: URL of Optuna's database, or `journal:FILE`; None: no studies.
        policy_file: as `autospec tune` writes it; None: none.

    Raises:
        ConfigurationError: the URL or the file is none of these.
        AutospecError: the storage cannot be read.
    """
    studies = () if study_storage is None else tuple(load_studies(study_storage))
    contents = {} if policy_file is None else _contents(policy_file)
    measured = load_report(store, Filters(policy=Tuned.name), with_positions=False) if contents else None
    rows = {} if measured is None else {row.group["segment"]: row for row in measured.segments if row.requests}
    made = contents.get("made", {})
    speed_ups = made.get("speed_up", {}) if isinstance(made, Mapping) else {}
    parts = {**contents.get("segments", {}), **({DEFAULT: contents["default"]} if contents else {})}
    trials = [trial for study in studies for trial in study.trials]
    return Tuning(
        studies=studies,
        storage=None if study_storage is None else _shown(study_storage),
        policy_file=None if policy_file is None else str(policy_file),
        chosen=tuple(
            Chosen(
                segment=str(segment),
                part=part,
                train=_trained(trials, str(segment), part),
                held_out=_interval(speed_ups.get(segment)),
                measured=rows.get(str(segment)),
            )
            for segment, part in parts.items()
        ),
        made=tuple(_flat("", made)),
        has_optuna_dashboard=importlib.util.find_spec("optuna_dashboard") is not None,
    )


def load_studies(storage: str) -> list[Study]:
    """All studies of a storage. A SQLite file or a server is opened read-only.

    Raises:
        ConfigurationError: it is no such URL.
        AutospecError: it cannot be read.
    """
    import optuna

    if storage.startswith(JOURNAL) and not Path(storage.removeprefix(JOURNAL)).is_file():
        raise AutospecError(f"--study-storage {_shown(storage)}: there is no such file")
    try:
        backend = _backend(storage)
        names = optuna.get_all_study_names(backend)
        return [_study(optuna.load_study(study_name=name, storage=backend)) for name in names]
    except (ArgumentError, ValueError) as error:
        raise ConfigurationError(f"--study-storage {_shown(storage)}: this is no database of Optuna's") from error
    except (SQLAlchemyError, OSError, RuntimeError) as error:
        why = str(getattr(error, "orig", error)).partition("\n")[0]
        raise AutospecError(f"--study-storage {_shown(storage)} cannot be read: {why}") from error


def label(part: Part) -> str:
    """A policy of one segment in a few words."""
    if "policy" not in part:
        source, length = str(part.get("source", NONE)), part.get("block_length", 0)
        ends = [f"{name}={part[name]}" for name in ("least_margin", "most_entropy") if name in part]
        return " ".join([f"{source}:{length}" if length else "off", *ends])
    settings = part.get("settings", {})
    inside = ", ".join(f"{name}={value}" for name, value in settings.items()) if isinstance(settings, Mapping) else ""
    return f"{part['policy']}{f' ({inside})' if inside else ''}"


def _contents(file: Path) -> Mapping[str, Any]:
    contents = read_contents(file)
    is_one = isinstance(contents, Mapping) and contents.get("format") == FORMAT and "default" in contents
    parts = [contents["default"], *contents.get("segments", {}).values()] if is_one else []
    if not is_one or not all(isinstance(part, Mapping) for part in parts):
        raise ConfigurationError(f"policy file {file}: this is no policy of `autospec tune`")
    found: Mapping[str, Any] = contents
    return found


def _backend(storage: str) -> Any:
    import optuna

    if storage.startswith(JOURNAL):
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        return JournalStorage(JournalFileBackend(storage.removeprefix(JOURNAL)))
    url = make_url(storage)
    if url.get_backend_name() == "sqlite":
        place = Path(url.database or "").absolute()
        if not place.is_file():
            raise FileNotFoundError(f"there is no file {place}")
        url = url.set(database=f"file:{quote(str(place))}").update_query_dict({"mode": "ro", "uri": "true"})
        return optuna.storages.RDBStorage(url.render_as_string(hide_password=False))
    options = {"connect_args": {"options": "-c default_transaction_read_only=on"}}
    return optuna.storages.RDBStorage(storage, engine_kwargs=options)


def _study(study: Any) -> Study:
    found = study.get_trials(deepcopy=False)
    states = Counter(trial.state.name.lower() for trial in found)
    walked = [
        Trial(trial.number, trial.user_attrs["part"], _pairs(trial.user_attrs["seconds"]))
        for trial in found
        if trial.state.name == "COMPLETE" and {"part", "seconds"} <= set(trial.user_attrs)
    ]
    distinct = {json.dumps(trial.part, sort_keys=True): trial for trial in reversed(walked)}
    ordered = sorted(distinct.values(), key=lambda trial: (-(trial.speed_up or 0.0), trial.number))
    return Study(study.study_name, dict(states), tuple(ordered))


def _pairs(stored: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
    return {str(name): (float(on), float(off)) for name, (on, off) in stored.items()}


def _trained(trials: Sequence[Trial], segment: str, part: Part) -> float | None:
    for trial in trials:
        if dict(trial.part) == dict(part):
            return trial.speed_up if segment == DEFAULT else trial.speed_up_in(segment)
    return None


def _interval(value: Any) -> tuple[float, float, float] | None:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 3:
        return None
    middle, low, high = (float(each) for each in value)
    return middle, low, high


def _flat(name: str, value: Any) -> list[tuple[str, str]]:
    """Rows of nested values, with the path to each; speed-ups stand in a table of their own."""
    if isinstance(value, Mapping):
        return [
            row
            for key, each in value.items()
            if name or key != "speed_up"
            for row in _flat(f"{name}.{key}" if name else str(key), each)
        ]
    return [(name, visible(str(value), VALUE_COLUMNS))]


def _shown(storage: str) -> str:
    """Without a password."""
    if storage.startswith(JOURNAL):
        return storage
    try:
        return make_url(storage).render_as_string(hide_password=True)
    except ArgumentError:
        return visible(storage, 60)
