"""An Optuna study that several processes and machines work on: who begins it says what is searched, and with what."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autospec.errors import AutospecError, ConfigurationError

if TYPE_CHECKING:
    import optuna

JOURNAL = "journal:"
"""Begins the name of a file that processes of one machine share, in the place of a database's URL."""
_CONTENT = "what is searched"
_OFFERED = "what seconds are reckoned with"
_PAUSES = (0.1, 0.3, 1.0, 3.0)  # seconds before a storage is tried again


def open_study(
    storage: str | None,
    name: str,
    content: str,
    offered: Mapping[str, Any] | None,
    first: Sequence[Mapping[str, Any]],
) -> tuple[optuna.Study, Mapping[str, Any] | None]:
    """The study of that name, made if missing.

    Args:
        storage: URL of Optuna's database, or `journal:FILE`; None: in memory.
        name: of the study.
        content: a digest of what is searched; the same for all who work on it.
        offered: plain values, by which all are to go.
        first: parameters of the first trials.

    Returns:
        The study, and what its first worker offered.

    Raises:
        ConfigurationError: the study is of something else.
        AutospecError: the storage cannot be used.
    """
    study, is_first = _opened(storage, name)
    if is_first:
        study.set_user_attr(_OFFERED, None if offered is None else dict(offered))
        for params in first:
            study.enqueue_trial(dict(params), skip_if_exists=True)
        study.set_user_attr(_CONTENT, content)  # last: with it all is said
        return study, offered
    known = _waited_for(study)
    if known is None:
        raise ConfigurationError(
            f"study {name!r} was begun, and nobody said of what: give another name (--study), or delete it"
        )
    if known != content:
        raise ConfigurationError(
            f"study {name!r} is of other requests, draft sources or models, block lengths, memory or another seed: "
            "give another name (--study)"
        )
    return study, study.user_attrs.get(_OFFERED)


def _opened(storage: str | None, name: str) -> tuple[optuna.Study, bool]:
    """The study, and whether it was made now. Of several processes that begin together, some fail at making tables."""
    import optuna

    for pause in (*_PAUSES, None):
        try:
            backend = _backend(storage)
            try:
                return optuna.create_study(storage=backend, study_name=name, direction="minimize"), True
            except optuna.exceptions.DuplicatedStudyError:
                return optuna.load_study(storage=backend, study_name=name), False
        except Exception as error:  # of optuna, SQLAlchemy or a driver of it
            if pause is None:
                why = str(error).partition("\n")[0]
                raise AutospecError(f"study {name!r}: its storage cannot be used: {why}") from error
            time.sleep(pause)
    raise AssertionError  # the last pause is None


def close_study(study: optuna.Study) -> None:
    """Give the connections to a database back."""
    from optuna.storages import RDBStorage

    storage = study._storage  # what it was made with, perhaps behind a cache; optuna closes neither
    backend = getattr(storage, "_backend", storage)
    if isinstance(backend, RDBStorage):
        backend.remove_session()
        backend.engine.dispose()


def _backend(storage: str | None) -> Any:
    if storage is None:
        return None
    from optuna.storages import JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend

    if not storage.startswith(JOURNAL):
        return RDBStorage(storage)  # one, whether the study is there or not: each has connections of its own
    return JournalStorage(JournalFileBackend(storage.removeprefix(JOURNAL)))


def _waited_for(study: optuna.Study, sleep: Callable[[float], None] = time.sleep) -> str | None:
    """What is searched, once the process that made the study has said it."""
    for pause in (*_PAUSES, None):
        known = study.user_attrs.get(_CONTENT)
        if known is not None:
            return str(known)
        if pause is not None:
            sleep(pause)
    return None
