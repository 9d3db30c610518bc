"""What experiment 10 computes with: costs of blocks, halves, and the gain that segments keep."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from autospec.segments import Prompt

EXPERIMENT = "10_segments"

CURVE = {1: 10.0, 2: 10.0, 4: 20.0}


def case(experiment: ModuleType, name: str, segment: str, accepted: int) -> Any:
    """Ten tokens, with drafts of one: `accepted` of ten are accepted."""
    blocks = {
        "none": experiment.Blocks({0: 10}, 0, 10),
        "ngram:1": experiment.Blocks({1: 10 - accepted}, accepted, 10),
        "ngram:3": experiment.Blocks({3: 10 - accepted}, accepted, 10),
    }
    text = "Write a Python function." if segment == "code" else "Tell me a story about the sea."
    return experiment.Case(name, segment, Prompt.of_text(f"{text} {name}"), blocks)


def test_seconds_of_blocks(experiment: ModuleType) -> None:
    blocks = experiment.Blocks({0: 2, 1: 1, 2: 1}, 1, 5)
    assert blocks.seconds("none", CURVE) == pytest.approx((2 * 10 + 10 + 15) / 1000)
    assert blocks.seconds("suffix:2", CURVE) == pytest.approx((2 * 10 + 10 + 15 + 4 * 0.1) / 1000)
    assert blocks.seconds("assistant:2", CURVE) == pytest.approx((2 * 10 + 10 + 15 + 4 * 3) / 1000)


def test_halves_hold_as_many_of_each_segment(experiment: ModuleType) -> None:
    cases = [case(experiment, f"{segment}{i}", segment, 0) for i in range(6) for segment in ("code", "story")]
    halves = experiment.splits(cases)
    assert len(halves) == experiment.SPLITS
    for known, unseen in halves:
        assert {c.prompt_id for c in known} | {c.prompt_id for c in unseen} == {c.prompt_id for c in cases}
        assert sum(c.segment == "code" for c in known) == sum(c.segment == "code" for c in unseen) == 3


def test_a_segment_keeps_its_own_action(experiment: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of three pay for code, where seven of ten are accepted, and not for stories, where none is."""
    monkeypatch.setattr(experiment, "SPLITS", 4)
    monkeypatch.setattr(experiment, "DRAFT_MS", {"ngram": (2.0, 0.0)})
    monkeypatch.setattr(
        experiment, "learned", lambda cases: (type("One", (), {"nearest": lambda self, prompt: "cluster-0"})(), 1)
    )
    cases = [
        case(experiment, f"{segment}{i}", segment, accepted)
        for i in range(8)
        for segment, accepted in (("code", 7), ("story", 0))
    ]
    found = experiment.kept(cases, CURVE, 0)
    one, true, signs, clusters = (found[name] for name in ("one segment", "true segments", "built-in", "clusters"))
    assert one["speed_up"] == pytest.approx(200 / (3 * 12 + 10 * 12), abs=1e-3)
    assert true["speed_up"] == pytest.approx(200 / (3 * 12 + 10 * 10), abs=1e-3)
    assert true["gain_95"][0] > 0
    assert (one["share_of_true_gain"], true["share_of_true_gain"], clusters["share_of_true_gain"]) == (0, 1, 0)
    assert signs == true
    assert found["each prompt's best"]["speed_up"] == true["speed_up"]
    alike = experiment.kept(cases, CURVE, 10**9)
    assert alike["true segments"]["gain"] == 0
    assert alike["true segments"]["share_of_true_gain"] is None


def test_confusion(experiment: ModuleType) -> None:
    assert experiment.confusion(["a", "a", "b"], ["x", "y", "x"]) == {"a": {"x": 1, "y": 1}, "b": {"x": 1}}
