"""A policy that sees part of the sources, or all segments as one; and tuned policies that are made of such parts."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import autospec
from autospec.controller import Controller
from autospec.drafts import NGram, make_sources
from autospec.errors import ConfigurationError
from autospec.policies import Fixed
from autospec.policies.base import asked
from autospec.policies.registry import build_policy, make_policy, sources_of
from autospec.policies.scoped import POOL, Scoped
from autospec.policies.stopping import ConfidenceStop
from autospec.policies.tuned import make_tuned, policy_file, presets, read_contents
from autospec.tuned_files import made_for
from autospec.types import Action, BlockContext, BlockOutcome, Offer, OfferOutcome, RequestContext
from tests import tiny

SOURCES = ("ngram", "suffix", "assistant")


class Costs:
    block_lengths = (1, 2, 4)
    version = 0

    def verify_seconds(self, num_tokens: int, context_tokens: int) -> float:
        return 1.0 + 0.01 * num_tokens

    def draft_seconds(self, source: str, block_length: int, context_tokens: int) -> float:
        return 0.01 * block_length

    def is_extrapolated(self, num_tokens: int, context_tokens: int, source: str | None = None) -> bool:
        return False


class Listens:
    """Keeps what it is told."""

    name = "listens"

    def __init__(self) -> None:
        self.asked: list[BlockContext] = []
        self.told: list[BlockOutcome] = []
        self.controls: list[RequestContext] = []

    def is_control(self, request: RequestContext) -> bool:
        self.controls.append(request)
        return True

    def choose(self, context: BlockContext) -> Action:
        self.asked.append(context)
        return Action()

    def observe(self, outcome: BlockOutcome) -> None:
        self.told.append(outcome)


def context(segment: str = "code") -> BlockContext:
    request = RequestContext(segment, 10, 20, False, SOURCES)
    offers = {"ngram": Offer(3), "suffix": Offer(2)}
    return BlockContext(request, 12, 2, SOURCES, offers, {"assistant": 5}, frozenset({"assistant"}))


def outcome(segment: str = "code") -> BlockOutcome:
    offers = tuple(OfferOutcome(name, Offer(1), 2, 1, 1) for name in ("ngram", "suffix"))
    return BlockOutcome(segment, Action(), 12, 0, 0, 0, 1, request=context(segment).request, offers=offers)


def tuned(contents: dict[str, Any]) -> Any:
    full = {"format": "autospec-policy", "version": 1, **contents}
    return make_tuned(full, lambda name, settings: build_policy(name, settings, Costs))


GOODPUT = {"policy": "goodput", "settings": {}}


class TestScoped:
    def test_it_knows_its_sources_alone(self) -> None:
        inner = Listens()
        policy = Scoped(inner, ["ngram", "assistant"])
        policy.choose(context())
        policy.observe(outcome())
        seen = inner.asked[0]
        assert seen.sources == seen.request.sources == ("ngram", "assistant")
        assert set(seen.offers) == {"ngram"}
        assert dict(seen.backlogs) == {"assistant": 5}
        assert seen.segment == inner.told[0].segment == "code"
        assert [each.source for each in inner.told[0].offers] == ["ngram"]

    def test_pooled_segments_are_one(self) -> None:
        inner = Listens()
        policy = Scoped(inner, pooled=True)
        for segment in ("code", "chat"):
            assert policy.is_control(context(segment).request)
            policy.choose(context(segment))
            policy.observe(outcome(segment))
        assert {each.segment for each in (*inner.controls, *inner.asked, *inner.told)} == {POOL}
        assert inner.asked[0].sources == SOURCES

    def test_in_all_else_it_is_that_policy(self) -> None:
        inner = build_policy("goodput", {}, Costs)
        policy = Scoped(inner, ["ngram"], pooled=True)
        assert (policy.name, policy.settings) == (inner.name, inner.settings)  # type: ignore[attr-defined]
        assert policy.wants_offers
        policy.choose(context())
        policy.observe(outcome())
        again = Scoped(build_policy("goodput", {}, Costs), ["ngram"], pooled=True)
        again.restore(policy.state())
        assert again.state() == policy.state()
        assert not hasattr(Scoped(Fixed()), "restore")
        assert not Scoped(Fixed()).is_control(context().request)
        assert copy.deepcopy(policy).state() == policy.state()

    @pytest.mark.parametrize(
        "options",
        [
            {"sources": []},
            {"sources": "ngram"},
            {"sources": [1]},
            {"sources": 5},
            {"sources": {"ngram": 1}},
            {"pooled": 1},
        ],
    )
    def test_what_makes_no_sense(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match="needed"):
            Scoped(Fixed(), **options)


class TestTuned:
    def test_segments_with_equal_parts_share_a_policy(self) -> None:
        part = {**GOODPUT, "sources": ["ngram"]}
        policy = tuned({"default": GOODPUT, "segments": {"a": part, "b": dict(part), "c": {**part, "pooled": True}}})
        assert policy.segments["a"] is policy.segments["b"] is not policy.segments["c"]
        assert [field for field, _ in policy.parts()] == ["default", "segments.a", "segments.c"]
        for segment in ("a", "b", "c"):
            policy.choose(context(segment))
            policy.observe(outcome(segment))
        again = tuned(policy.settings)
        again.restore(policy.state())
        assert again.state() == policy.state()

    def test_offers_are_asked_for_where_a_part_reads_them(self) -> None:
        policy = tuned({"default": {"source": "ngram", "block_length": 4}, "segments": {"a": GOODPUT}})
        assert asked(policy, "a", SOURCES[:2]) == SOURCES[:2]
        assert not asked(policy, "b", SOURCES[:2])
        narrow = tuned({"default": {**GOODPUT, "sources": ["suffix", "assistant"]}})
        assert list(asked(narrow, "b", SOURCES[:2])) == ["suffix"]
        assert list(Controller(narrow).asks("b", SOURCES[:2])) == ["suffix"]

    def test_it_pads_where_a_part_does(self) -> None:
        fixed = {"source": "ngram", "block_length": 4}
        assert not hasattr(tuned({"default": fixed}), "verify_width")
        assert tuned({"default": fixed, "segments": {"a": GOODPUT}}).verify_width(2, 100) == 2

    def test_guards_of_a_file_draw_controls_anew_in_each_process(self) -> None:
        settings = {"policy": GOODPUT, "control_share": 0.5}

        def drawn(**more: object) -> set[tuple[bool, ...]]:
            part = {"policy": "guard", "settings": {**settings, **more}}
            policies = [tuned({"default": part}) for _ in range(3)]
            return {tuple(policy.is_control(context().request) for _ in range(40)) for policy in policies}

        assert len(drawn()) == 3
        assert len(drawn(seed=1)) == 1

    def test_sources_that_a_part_needs_must_be_there(self) -> None:
        policy = tuned({"default": {**GOODPUT, "sources": ["ngram", "assistant"]}})
        assert sources_of(policy) == {"ngram", "assistant"}
        with pytest.raises(ConfigurationError, match=r"default, needs draft source 'assistant'"):
            make_policy(policy, ["ngram"], Costs)

    @pytest.mark.parametrize(
        ("drafts", "message"),
        [
            ({"ngram": "ngram"}, "drafts.ngram: {.*} is needed"),
            ({"ngram": {"settings": {}}}, "drafts.ngram: {.*} is needed"),
            ({"ngram": {"source": "ngram", "settings": 3}}, "drafts.ngram: {.*} is needed"),
            ([], "drafts: an object is needed"),
        ],
    )
    def test_drafts_that_make_no_sense(self, drafts: Any, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            tuned({"default": GOODPUT, "drafts": drafts})

    def test_blocks_of_a_fixed_part_may_end_by_confidence(self) -> None:
        policy = tuned(
            {"default": {"source": "assistant", "block_length": 6, "least_margin": 0.4, "most_entropy": 2.0}}
        )
        stop = policy.choose(context()).stop
        assert isinstance(stop, ConfidenceStop)
        assert stop.wants_more()
        assert not stop.ends(0.4, 2.0)
        assert stop.ends(0.39, 0.0)
        assert stop.ends(1.0, 2.01)
        assert policy.default.settings == {
            "source": "assistant",
            "block_length": 6,
            "least_margin": 0.4,
            "most_entropy": 2.0,
        }
        assert Fixed("a", block_length=2, most_entropy=0.0).settings["most_entropy"] == 0.0
        assert Fixed("ngram", block_length=2).settings == {"source": "ngram", "block_length": 2}
        with pytest.raises(ConfigurationError, match="least_margin=2"):
            Fixed("assistant", block_length=2, least_margin=2)


def written(folder: Path, contents: dict[str, Any]) -> str:
    path = folder / "policy.toml"
    path.write_text(tomli_w.dumps({"format": "autospec-policy", "version": 1, **contents}))
    return f"tuned:{path}"


class TestWrap:
    def test_the_file_brings_its_sources(self, tmp_path: Path) -> None:
        drafts = {"ngram_pairs": {"source": "ngram", "settings": {"min_ngram": 2}}}
        file = written(tmp_path, {"default": {"source": "ngram_pairs", "block_length": 4}, "drafts": drafts})
        model = tiny.llama()
        with autospec.wrap(model, tokenizer=tiny.tokenizer(), policy=file) as speculator:
            assert speculator.sources["ngram_pairs"].min_ngram == 2  # type: ignore[attr-defined]
            model.generate(tiny.prompt(), max_new_tokens=12, do_sample=False)
            record = speculator.last_request
        assert record is not None
        assert record.fallback_reason is None
        assert "ngram_pairs:4" in record.actions

    @pytest.mark.parametrize(
        ("draft", "message"),
        [
            ({"source": "assistant"}, "drafts.x: source: known are ngram, suffix, not 'assistant'"),
            ({"source": "ngram", "settings": {"min_ngram": 0}}, "drafts.x: min_ngram=0"),
            ({"source": "ngram", "settings": {"colour": 0}}, "drafts.x: .*colour"),
        ],
    )
    def test_sources_that_cannot_be_made(self, draft: dict[str, Any], message: str, tmp_path: Path) -> None:
        file = written(tmp_path, {"default": {"source": "x", "block_length": 4}, "drafts": {"x": draft}})
        with pytest.raises(ConfigurationError, match=message):
            autospec.wrap(tiny.llama(), policy=file)

    def test_names_are_made_as_the_file_says_and_objects_are_left(self, tmp_path: Path) -> None:
        drafts = {"ngram": {"source": "ngram", "settings": {"min_ngram": 3}}, "suffix": {"source": "suffix"}}
        file = written(tmp_path, {"default": {"source": "ngram", "block_length": 4}, "drafts": drafts})
        with autospec.wrap(tiny.llama(), policy=file) as speculator:  # `ngram` is there by default
            assert speculator.sources["ngram"].min_ngram == 3  # type: ignore[attr-defined]
            assert set(speculator.sources) == {"ngram", "suffix"}
        own = NGram(min_ngram=2)
        with autospec.wrap(tiny.llama(), drafts=[own], policy=file) as speculator:
            assert speculator.sources["ngram"] is own

    def test_sources_of_the_file_are_those_that_it_was_tuned_with(self, tmp_path: Path) -> None:
        """Made under their own names they are no other sources: nothing is warned of, and nothing measured."""
        model = tiny.llama()
        made = made_for(model, make_sources(["ngram", "suffix"]))
        drafts = {"ngram": {"source": "ngram"}, "suffix": {"source": "suffix"}}
        default = {"source": "suffix", "block_length": 4}
        file = written(tmp_path, {"default": default, "drafts": drafts, "made": made})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with autospec.wrap(model, policy=file) as speculator:
                assert speculator._costs is None

    def test_elsewhere_than_it_was_tuned_it_warns_and_measures(self, tmp_path: Path) -> None:
        model = tiny.llama()
        here = made_for(model, make_sources(["ngram"]))
        default = {"source": "ngram", "block_length": 4}
        with autospec.wrap(model, policy=written(tmp_path, {"default": default, "made": here})) as speculator:
            assert speculator._costs is None
        changed = {
            **here,
            "device": "a machine elsewhere",
            "target": {**here["target"], "weights": 1},
            "drafts": {"ngram": "0"},
        }
        file = written(tmp_path, {"default": default, "made": changed})
        with (
            pytest.warns(
                UserWarning, match=r"target \(weights 1\); device a machine elsewhere; other settings of ngram"
            ),
            autospec.wrap(model, policy=file) as speculator,
        ):
            assert speculator._costs is not None


class TestPresets:
    @pytest.mark.parametrize("name", presets())
    def test_each_is_whole_and_says_where_it_is_from(self, name: str) -> None:
        policy = make_policy(f"tuned:{name}", [*SOURCES, *read_contents(name)["drafts"]], Costs)
        made = policy.settings["made"]  # type: ignore[attr-defined]
        assert {"by", "at", "traffic", "target", "device", "threads", "versions", "speed_up"} <= set(made)
        assert policy_file(name).parent.name == "presets"

    def test_there_are_some_and_a_name_that_is_none_lists_them(self) -> None:
        assert presets()
        with pytest.raises(
            ConfigurationError, match=f"policy file nothing: No such file.*come with autospec: .*{presets()[0]}"
        ):
            read_contents("nothing")

    def test_a_file_of_that_name_comes_first(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        Path(presets()[0]).write_text("{}")
        assert policy_file(presets()[0]).resolve().parent == tmp_path
