"""experiments/24_growth: its laws on curves whose law is known, and that its measurements run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import torch

EXPERIMENT = "24_growth"
X = (1, 2, 4, 8, 16, 32, 64)


@pytest.fixture(scope="module")
def growth(experiment: ModuleType) -> Iterator[ModuleType]:
    yield experiment
    sys.path.remove(str(experiment.FOLDER))
    del sys.modules["laws"]


@pytest.mark.parametrize("law", ["constant", "logarithm", "linear", "square"])
def test_a_law_is_found_again_in_noise(growth: ModuleType, law: str) -> None:
    x = np.asarray(X, dtype=float)
    curve = {"constant": 0 * x, "logarithm": np.log(x), "linear": x, "square": x**2}[law]
    noise = np.random.default_rng(0).normal(0.0, 0.01 * max(1.0, float(curve.max())), len(X))
    found = growth.fit(X, 5.0 + 2.0 * curve + noise)
    assert found["law"] == law
    assert found["added"] == pytest.approx(2.0 * (curve[-1] - curve[0]), rel=0.05)


def test_what_falls_is_no_growth(growth: ModuleType) -> None:
    found = growth.fit(X, [10.0 - 0.1 * x for x in X])
    assert (found["law"], found["added"]) == ("constant", 0.0)


def test_answers_are_measured(growth: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole calls by the clock; their differences where every token takes two milliseconds."""
    prompt = torch.randint(1, growth.VOCABULARY, (1, 32))
    for arm in ("generate", "off", "auto"):
        assert growth._answer_seconds(growth.tiny(), arm, prompt, 16, growth.GREEDY) > 0
    monkeypatch.setattr(growth, "_answer_seconds", lambda model, arm, prompt, length, decoding: 0.5 + 0.002 * length)
    found = growth.answers(512, 1)
    assert found["answer_tokens"] == [256, 512]
    for kind in ("new text", "repeating text"):
        assert found[kind] == {arm: pytest.approx([2.0, 2.0]) for arm in ("generate", "off", "auto")}
