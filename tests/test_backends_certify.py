"""The certifier over buffers of fixed shape: the same proof for the session and the cache that a backend brings."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from test_certify import CASES, a_case, violates

from autospec.backends import Static
from autospec.backends.backend import Backend, prepare
from autospec.backends.static_cache import StaticStore
from autospec.certify import Case, certify
from autospec.decoding.decoder import Decoder
from autospec.policies import Fixed

pytestmark = pytest.mark.compat

SHAPES = Static("plain", widths=(1, 2, 3), capacities=(12, 24))


def backend_of(case: Case) -> Backend:
    models = {name: getattr(source, "static_draft", None) for name, source in case.sources().items()}
    return prepare(case.target, {name: model for name, model in models.items() if model is not None}, SHAPES)


def certificate(case: Case) -> Any:
    backend = backend_of(case)
    assert not backend.failures
    made: list[Decoder] = []

    def decoder(**options: Any) -> Decoder:
        made.append(Decoder(**options, backend=backend))
        return made[-1]

    found = next(certify([case], decoder))  # type: ignore[arg-type]
    assert made
    assert not any("eagerly" in note for each in made for note in each.tally.notes)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_exact(case: Case) -> None:
    found = certificate(case)
    assert found.is_exact, found


def test_drafts_run_over_buffers_too() -> None:
    case = a_case()
    draft = next(iter(case.sources().values())).static_draft
    backend = backend_of(case)
    assert set(backend.drafts) == {id(draft)}


def test_a_cache_off_by_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    crop = StaticStore.crop
    monkeypatch.setattr(StaticStore, "crop", lambda self, num_tokens: crop(self, max(0, num_tokens - 1)))
    case = a_case(policy=lambda: Fixed("assistant", block_length=2))
    found = next(certify([case], partial(Decoder, backend=backend_of(case))))  # type: ignore[arg-type]
    assert not found.is_exact
    assert not violates(case)  # without the buffers nothing is wrong


def test_rejected_tokens_that_stay_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = a_case(sampling="paired")
    monkeypatch.setattr(StaticStore, "crop", lambda self, num_tokens: None)
    found = next(certify([case], partial(Decoder, backend=backend_of(case))))  # type: ignore[arg-type]
    assert not found.is_exact
