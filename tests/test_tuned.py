"""Policies read from a file: a policy for each segment, and clear words about files that are none."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autospec.errors import ConfigurationError
from autospec.policies import Tuned, make_policy
from autospec.policies.serial import dump, load
from autospec.types import Action, BlockContext, BlockOutcome, RequestContext

CONTENTS: dict[str, Any] = {
    "format": "autospec-policy",
    "version": 1,
    "default": {"source": "none", "block_length": 0},
    "segments": {
        "code": {"source": "ngram", "block_length": 8},
        "chat": {"policy": "ucb", "settings": {"width": 0.5}},
    },
    "made": {"by": "autospec tune", "requests": 120},
}


@dataclass(frozen=True)
class Costs:
    block_lengths: tuple[int, ...] = (2, 4)
    version: int = 0

    def verify_seconds(self, num_tokens: int, context_tokens: int) -> float:
        return 0.04

    def draft_seconds(self, source: str, block_length: int, context_tokens: int) -> float:
        return 0.0001

    def is_extrapolated(self, num_tokens: int, context_tokens: int, source: str | None = None) -> bool:
        return False


def context(segment: str, sources: tuple[str, ...] = ("ngram",)) -> BlockContext:
    request = RequestContext(segment, prompt_tokens=50, max_new_tokens=500, do_sample=False, sources=sources)
    return BlockContext(request, context_tokens=100, output_tokens=50, sources=sources)


def played(policy: Any, segment: str, blocks: int) -> list[str]:
    """`ngram:4` is best."""
    labels = []
    for _ in range(blocks):
        action: Action = policy.choose(context(segment))
        k = action.block_length
        accepted = 3 if k == 4 else 0
        policy.observe(
            BlockOutcome(segment, action, 100, k, min(k, accepted + 1), accepted, accepted + 1, verify_seconds=0.05)
        )
        labels.append(action.label)
    return labels


def written(folder: Path, contents: Any) -> str:
    file = folder / "policy.json"
    file.write_text(contents if isinstance(contents, str) else json.dumps(contents))
    return f"tuned:{file}"


def read(folder: Path, contents: Any, sources: tuple[str, ...] = ("ngram",)) -> Tuned:
    policy = make_policy(written(folder, contents), sources, Costs)
    assert isinstance(policy, Tuned)
    return policy


class TestTuned:
    def test_each_segment_has_its_policy_and_others_the_default(self, tmp_path: Path) -> None:
        policy = read(tmp_path, CONTENTS)
        assert policy.name == "tuned"
        assert policy.choose(context("code")).label == "ngram:8"
        assert policy.choose(context("unheard of")).label == "none"
        assert played(policy, "chat", 60)[30:].count("ngram:4") >= 25

    def test_actions_need_no_costs(self, tmp_path: Path) -> None:
        def never() -> Any:
            raise AssertionError

        contents = {**CONTENTS, "segments": {"code": {"source": "ngram", "block_length": 8}}}
        assert make_policy(written(tmp_path, contents), ["ngram"], never).choose(context("code")).label == "ngram:8"

    def test_costs_are_measured_once(self, tmp_path: Path) -> None:
        calls = []

        def measure() -> Costs:
            calls.append(1)
            return Costs()

        contents = {**CONTENTS, "default": {"policy": "thompson"}}
        make_policy(written(tmp_path, contents), ["ngram"], measure)
        assert len(calls) == 1

    def test_segments_and_made_may_be_left_out(self, tmp_path: Path) -> None:
        short = {key: CONTENTS[key] for key in ("format", "version", "default")}
        assert read(tmp_path, short).choose(context("code")).label == "none"

    def test_offers_are_wanted_where_a_policy_inside_wants_them(self, tmp_path: Path) -> None:
        assert not read(tmp_path, CONTENTS).wants_offers
        assert read(tmp_path, {**CONTENTS, "default": {"policy": "hedge"}}).wants_offers

    def test_a_policy_inside_may_take_controls(self, tmp_path: Path) -> None:
        policy = read(tmp_path, CONTENTS)
        assert not policy.is_control(context("code").request)
        policy.segments["code"].is_control = lambda request: True  # type: ignore[attr-defined]
        assert policy.is_control(context("code").request)
        assert not policy.is_control(context("chat").request)

    def test_what_was_learned_survives_json(self, tmp_path: Path) -> None:
        policy = read(tmp_path, CONTENTS)
        played(policy, "chat", 37)
        other = load(json.loads(json.dumps(dump(policy), sort_keys=True)), Costs())
        assert other.settings == CONTENTS  # type: ignore[attr-defined]
        assert played(other, "chat", 50) == played(policy, "chat", 50)

    @pytest.mark.parametrize(
        "state",
        [
            None,
            {},
            {"parts": {}},
            {"parts": [["default", None]]},
            {"parts": [["default", {}], ["segments.code", None], ["segments.chat", {}]]},
            {"parts": [["default", None], ["segments.code", None], ["segments.chat", None]]},
            {"parts": [["default", None], ["segments.code", None], ["segments.chat", {"evidence": 1}]]},
        ],
    )
    def test_what_is_no_state_is_refused(self, state: Any, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="no state of policy"):
            read(tmp_path, CONTENTS).restore(state)


class TestFiles:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"format": "other"}, "format: 'autospec-policy' is needed, not 'other'"),
            ({"format": None}, "format: 'autospec-policy' is needed"),
            ({"version": 2}, "version: this autospec reads version 1, not 2"),
            ({"version": True}, "version: this autospec reads version 1, not True"),
            ({"colour": 1}, "unknown field 'colour': known are default, drafts, format, made, segments, version"),
            ({"segments": []}, r"segments: an object is needed, not \[\]"),
            ({"made": "yesterday"}, "made: an object is needed"),
            ({"default": None}, "default: {.*} or {.*} is needed, not None"),
            ({"default": {"source": "ngram"}}, "default: {.*} or {.*} is needed"),
            ({"default": {"source": "ngram", "block_length": -1}}, "default: block_length=-1: a whole number"),
            ({"default": {"source": "ngram", "block_length": 2.5}}, "default: block_length=2.5"),
            ({"default": {"source": "none", "block_length": 4}}, "default: draft source 'none' proposes nothing"),
            ({"default": {"source": ["ngram"], "block_length": 4}}, r"default: source=\['ngram'\]: the name of"),
            ({"default": {"policy": "magic"}}, "default: unknown policy 'magic': known are fixed"),
            ({"default": {"policy": "tuned"}}, "default: policy: a tuned policy cannot be inside another one"),
            ({"default": {"policy": "ucb", "more": 1}}, "default: unknown field 'more': known are policy, pooled"),
            ({"default": {"policy": "ucb", "settings": 3}}, "default: settings of policy 'ucb': an object is needed"),
            ({"segments": {"a b": {"policy": "ucb", "settings": {"width": -1}}}}, "segments.a b: width=-1: a number"),
            ({"segments": {"code": {"policy": "ucb", "settings": {"x": 1}}}}, "segments.code: unknown setting 'x'"),
            ({"segments": {"code": {"source": "suffix", "block_length": 4}}}, "segments.code.* needs .*'suffix'"),
        ],
    )
    def test_a_bad_one_is_named_with_the_field(self, change: dict[str, Any], message: str, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=message) as error:
            read(tmp_path, {**CONTENTS, **change})
        assert "policy.json" in str(error.value)
        assert "\n" not in str(error.value)

    def test_default_is_needed(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=r"policy\.json: default: it is missing"):
            read(tmp_path, {key: value for key, value in CONTENTS.items() if key != "default"})

    @pytest.mark.parametrize(
        ("contents", "message"),
        [("", "no JSON"), ("{", "no JSON"), ("[1]", "an object is needed, not list"), ("7", "not int")],
    )
    def test_no_json_object(self, contents: str, message: str, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=rf"policy file .*policy\.json: .*{message}"):
            read(tmp_path, contents)

    def test_bytes_that_are_no_text(self, tmp_path: Path) -> None:
        (tmp_path / "policy.json").write_bytes(b"\xff\xfe{")
        with pytest.raises(ConfigurationError, match="no JSON"):
            make_policy(f"tuned:{tmp_path / 'policy.json'}", ["ngram"], Costs)

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        for path in (tmp_path / "none.json", tmp_path):
            with pytest.raises(ConfigurationError, match=f"policy file {path}: "):
                make_policy(f"tuned:{path}", ["ngram"], Costs)
