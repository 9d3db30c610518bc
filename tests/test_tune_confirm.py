"""A tuned policy beside plain decoding, live: what is decoded, in which order, and what is made of the seconds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import autospec
from autospec.certify.cases import Costs, Switching
from autospec.decoding.ties import Difference
from autospec.drafts import Assistant, NGram, Suffix
from autospec.errors import AutospecError, ConfigurationError
from autospec.policies import Fixed, Goodput, Guard
from autospec.policies.registry import build_policy
from autospec.policies.tuned import make_tuned
from autospec.scores import DraftScores, OfferScores, ScoredRequest
from autospec.scores.luck import Luck
from autospec.scores.scorer import Scorer
from autospec.scores.walk import Walked, walk
from autospec.traffic import TrafficRequest
from autospec.tune import confirm as module
from autospec.tune.arms import Answer, Arm, recorded_options, teach
from autospec.tune.confirm import WARM_UP_TOKENS, Compared, compare, confirm, confirm_lines, summary
from autospec.types import Action, BlockOutcome
from tests import tiny

EXPERIMENT = "18_replay_vs_live"
WHEN = datetime(2026, 1, 1, tzinfo=UTC)
TOKENS = 24


class Clock:
    """Seconds that pass with the target's forwards alone: one each."""

    def __init__(self, model: Any) -> None:
        self.now = 0.0
        forward = model.forward

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.now += 1.0
            return forward(*args, **kwargs)

        model.forward = counted

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def model() -> Any:
    return tiny.llama()


def recorded(model: Any, number: int, segment: str = "s", **options: Any) -> TrafficRequest:
    prompt = tiny.prompt(14, seed=number)
    options = {"max_new_tokens": TOKENS, "do_sample": False, **options}
    torch.manual_seed(number)
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    return TrafficRequest(
        request_id=f"r{number}",
        started_at=WHEN + timedelta(seconds=number),
        segment=segment,
        prompt=tuple(prompt[0].tolist()),
        output=tuple(output[0, prompt.shape[1] :].tolist()),
        options=options,
    )


def walked(request: TrafficRequest, off: float = 3.0, on: float = 2.0, *, is_control: bool = False) -> Walked:
    """A prediction, by numbers of one's own."""
    scored = ScoredRequest(
        request_id=request.request_id,
        started_at=request.started_at,
        segment=request.segment,
        prompt_tokens=len(request.prompt),
        output_tokens=len(request.output),
        max_new_tokens=TOKENS,
        do_sample=False,
        temperature=0.0,
        prefill_seconds=1.0,
    )
    return Walked(scored, is_control, seconds=on, off_seconds=off)


def by_id(requests: Sequence[TrafficRequest], **options: Any) -> dict[str, Walked]:
    return {each.request_id: walked(each, **options) for each in requests}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the arms are asked for, and answers by `script.say` in place of decoding."""
    found = SimpleNamespace(asked=[], say=lambda arm, request, options: Answer(request.output, 1.0, 0.0, "greedy"))

    def answer(arm: Arm, request: TrafficRequest, **options: Any) -> Answer:
        name = "off" if arm._policy.name == "off" else "on"
        found.asked.append((name, request.request_id, options))
        made: Answer = found.say(name, request, options)
        return made

    monkeypatch.setattr(Arm, "answer", answer)
    return found


NGRAM = Fixed("ngram", block_length=4)


class TestOrder:
    def test_each_way_is_first_in_turn_after_a_call_of_both_that_does_not_count(
        self, model: Any, script: SimpleNamespace
    ) -> None:
        requests = [recorded(model, number) for number in range(4)]
        script.say = lambda arm, request, options: Answer(
            request.output, 100.0 if "most_tokens" in options else 2.0 if arm == "off" else 1.0, 0.0, "greedy"
        )
        found = confirm(model, None, ["ngram"], NGRAM, requests, by_id(requests))
        first, asked = script.asked[:2], script.asked[2:]
        assert {name for name, _, _ in first} == {"off", "on"}
        assert all(options == {"learns": False, "most_tokens": WARM_UP_TOKENS} for _, _, options in first)
        assert [(name, request) for name, request, _ in asked] == [
            ("off", "r0"),
            ("on", "r0"),
            ("on", "r1"),
            ("off", "r1"),
            ("off", "r2"),
            ("on", "r2"),
            ("on", "r3"),
            ("off", "r3"),
        ]
        assert found[-1].measured.ratio == pytest.approx(2.0)
        assert (found[-1].off_seconds, found[-1].seconds) == (8.0, 4.0)

    def test_both_begin_with_the_same_noise_and_pairs_with_another(self, model: Any, script: SimpleNamespace) -> None:
        requests = [recorded(model, number) for number in range(3)]
        confirm(model, None, ["ngram"], NGRAM, requests, by_id(requests), repeats=2, seed=10)
        seeds = [options["seed"] for _, _, options in script.asked[2:]]
        assert seeds == [10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15]

    def test_repeats_turn_too_and_only_the_last_is_learned_from(self, model: Any, script: SimpleNamespace) -> None:
        requests = [recorded(model, 0)]
        numbers = itertools.count(1)
        script.say = lambda arm, request, options: Answer(request.output, float(next(numbers)), 0.0, "greedy")
        (_, every) = confirm(model, None, ["ngram"], NGRAM, requests, by_id(requests), repeats=2)
        asked = script.asked[2:]
        assert [name for name, _, _ in asked] == ["off", "on", "on", "off"]
        assert [options["learns"] for _, _, options in asked] == [False, False, True, True]
        assert (every.off_seconds, every.seconds) == ((3 + 6) / 2, (4 + 5) / 2)

    def test_controls_of_the_walk_are_controls_live(self, model: Any, script: SimpleNamespace) -> None:
        requests = [recorded(model, number) for number in range(2)]
        predicted = by_id(requests) | {"r1": walked(requests[1], is_control=True)}
        confirm(model, None, ["ngram"], NGRAM, requests, predicted)
        controls = [(name, request) for name, request, options in script.asked[2:] if options["is_control"]]
        assert controls == [("on", "r1")]

    def test_so_many_at_most_of_each_segment_in_turn(self, model: Any, script: SimpleNamespace) -> None:
        names = "aaaabbc"
        requests = [recorded(model, number, segment) for number, segment in enumerate(names)]
        found = confirm(model, None, ["ngram"], NGRAM, requests, by_id(requests), max_requests=4)
        assert [request for _, request, _ in script.asked[2::2]] == ["r0", "r1", "r4", "r6"]
        assert [(each.segment, each.requests) for each in found] == [("a", 2), ("b", 1), ("c", 1), ("all", 4)]

    def test_what_was_not_walked_is_not_decoded(self, model: Any, script: SimpleNamespace) -> None:
        requests = [recorded(model, number) for number in range(3)]
        confirm(model, None, ["ngram"], NGRAM, requests, by_id(requests[1:]))
        assert {request for _, request, _ in script.asked} == {"r1", "r2"}
        with pytest.raises(ConfigurationError, match="nothing to confirm"):
            confirm(model, None, ["ngram"], NGRAM, requests, {})


class TestSeconds:
    def test_the_ratio_is_what_the_clock_says(self, model: Any) -> None:
        """A second for each forward: plainly as many as tokens, under the policy one for prefill and each block."""
        requests = [recorded(model, number) for number in range(3)]
        clock = Clock(model)
        seen: list[Compared] = []
        (segment, every) = confirm(
            model, None, ["ngram"], NGRAM, requests, by_id(requests), clock=clock, progress=seen.append
        )
        assert [each.off_seconds for each in seen] == [TOKENS] * 3
        assert all(each.seconds < TOKENS for each in seen)
        assert every.off_seconds == 3 * TOKENS
        assert every.measured.ratio == pytest.approx(3 * TOKENS / sum(each.seconds for each in seen))
        assert every.measured.low <= every.measured.ratio <= every.measured.high
        assert every.same_output == 3
        assert every.predicted.ratio == pytest.approx((3.0 + 1.0) / (2.0 + 1.0))  # prefill on both sides
        assert every.surplus == pytest.approx(every.predicted.ratio / every.measured.ratio - 1.0)
        assert replace(segment, segment="all") == every

    def test_a_control_takes_what_plain_decoding_takes(self, model: Any) -> None:
        requests = [recorded(model, 0)]
        predicted = {"r0": walked(requests[0], is_control=True)}
        (_, every) = confirm(model, None, ["ngram"], NGRAM, requests, predicted, clock=Clock(model))
        assert every.measured.ratio == pytest.approx(1.0)

    def test_other_lengths_are_brought_to_the_plain_one(self) -> None:
        request = TrafficRequest("r", WHEN, "s", (1,), (1, 2))
        off = Answer((1, 2, 3), 5.0, 1.0, "greedy")
        on = Answer((1, 2, 4, 5, 6), 5.0, 1.0, "greedy")
        assert compare(request, [(off, on)], ["tie"]) == Compared(request, 5.0, 1.0 + 4.0 / 2, "tie")
        assert compare(request, [(off, off), (off, on)], ["same", "tie"]) == Compared(request, 5.0, 4.0, "tie")
        with pytest.raises(AutospecError, match="one token"):
            compare(request, [(off, Answer((1,), 1.0, 1.0, "greedy"))], ["tie"])

    def test_the_walk_foretells_the_blocks(self, model: Any) -> None:
        """Costs of a second for each forward, and the clock that keeps them: predicted is measured."""

        class Forwards(Costs):
            def verify_seconds(self, num_tokens: int, context_tokens: int) -> float:
                return 1.0

            def draft_seconds(self, source: str, block_length: int, context_tokens: int) -> float:
                return 0.0

        requests = [recorded(model, number % 3) for number in range(6)]
        requests = [replace(each, request_id=f"r{number}") for number, each in enumerate(requests)]
        policy = Fixed("suffix", block_length=4)
        scorer = Scorer(model, {"suffix": Suffix()})
        scored = [replace(scorer.score(each), prefill_seconds=1.0) for each in requests]
        predicted = {each.request.request_id: each for each in walk(policy, scored[2:], Forwards(), luck=Luck())}
        drafts = teach(model, ["suffix"], requests[:2])
        (_, every) = confirm(model, None, drafts, policy, requests[2:], predicted, clock=Clock(model))
        assert every.predicted.ratio > 1.2
        assert every.surplus == pytest.approx(0.0, abs=1e-9)


class Noting:
    """Always the same action; remembers how many blocks it was told of."""

    name = "noting"

    def __init__(self, action: Action) -> None:
        self.action, self.blocks = action, 0

    def choose(self, context: Any) -> Action:
        return self.action

    def observe(self, outcome: BlockOutcome) -> None:
        self.blocks += 1

    def state(self) -> dict[str, Any]:
        return {"blocks": self.blocks}

    def restore(self, state: dict[str, Any]) -> None:
        self.blocks = state["blocks"]


class TestArms:
    def test_sampled_answers_are_the_same_text_from_the_same_seed(self, model: Any) -> None:
        requests = [recorded(model, number, do_sample=True, temperature=0.9, top_k=0) for number in range(4)]
        drafts = [NGram(), Assistant(tiny.near_copy(model))]
        policy = Switching(Action("assistant", 3), Action("ngram", 3))
        (_, every) = confirm(model, None, drafts, policy, requests, by_id(requests))
        assert every.same_output == 4
        (_, other) = confirm(
            model, None, [Assistant(tiny.near_copy(model))], Fixed("assistant", block_length=3), requests,
            by_id(requests), sampling="maximal",
        )  # fmt: skip
        assert other.same_output < 4
        assert other.ties == other.different == 0
        assert any("not examined" in line for line in confirm_lines([other]))

    def test_plain_decoding_teaches_no_source(self, model: Any) -> None:
        """Its answer would be copied; what the policy's own answer teaches is there once."""
        requests = [recorded(model, number) for number in range(3)]
        (source,) = teach(model, ["suffix"], requests[:1])
        confirm(model, None, [source], Fixed("suffix", block_length=4), requests[1:], by_id(requests), repeats=3)
        assert isinstance(source, Suffix)
        assert source.pools[""].num_tokens == 3 * (TOKENS + 1)  # one each, and its end

    def test_a_policy_keeps_what_it_learns_from_one_repeat(self, model: Any) -> None:
        requests = [recorded(model, 0)]
        policies = [Noting(Action("ngram", 2)) for _ in range(2)]
        for policy, repeats in zip(policies, (1, 3), strict=True):
            confirm(model, None, ["ngram"], policy, requests, by_id(requests), repeats=repeats)
        assert policies[0].blocks == policies[1].blocks > 0

    def test_it_goes_on_from_what_the_policy_knows(self, model: Any) -> None:
        policy = Noting(Action("ngram", 2))
        policy.blocks = 1_000
        requests = [recorded(model, 0)]
        confirm(model, None, ["ngram"], policy, requests, by_id(requests))
        assert policy.blocks > 1_000

    def test_costs_learn_where_they_are_given(self, model: Any) -> None:
        class Told(Costs):
            def __init__(self) -> None:
                self.outcomes = 0

            def observe(self, outcome: BlockOutcome) -> None:
                self.outcomes += 1

        costs, requests = Told(), [recorded(model, 0)]
        policy = Guard(Goodput(costs), costs, control_share=0.5)
        confirm(model, None, ["ngram"], policy, requests, by_id(requests))
        assert costs.outcomes == 0
        confirm(model, None, ["ngram"], policy, requests, by_id(requests), costs=costs)  # type: ignore[arg-type]
        assert costs.outcomes > 0

    def test_nothing_is_measured(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Not even for a policy that was tuned on another device."""

        def measuring(_: Any) -> Any:
            raise AssertionError("measured")

        monkeypatch.setattr(autospec.Speculator, "_measure_costs", measuring)
        contents = {
            "format": "autospec-policy",
            "version": 1,
            "default": {"source": "ngram", "block_length": 4},
            "made": {"device": "another", "drafts": {"ngram": "another"}},
        }
        policy = make_tuned(contents, lambda name, settings: build_policy(name, settings, Costs))
        requests = [recorded(model, 0)]
        (_, every) = confirm(model, None, ["ngram"], policy, requests, by_id(requests), clock=Clock(model))
        assert every.measured.ratio > 1.0

    def test_options_are_the_recorded_ones(self, model: Any) -> None:
        request = recorded(model, 0)
        options = {"do_sample": False, "temperature": 0.5, "max_new_tokens": 7, "max_length": 20}
        assert recorded_options(replace(request, options=options)) == {"do_sample": False, "max_new_tokens": 7}
        drawn = {"do_sample": True, "temperature": 0.5}
        assert recorded_options(replace(request, options=drawn)) == {**drawn, "max_new_tokens": len(request.output)}
        arm = Arm(model, None, None)
        assert arm.answer(replace(request, options=options)).tokens == request.output[:7]
        assert arm.answer(request, most_tokens=3).tokens == request.output[:3]

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"repeats": 0}, "repeats=0"),
            ({"max_requests": True}, "max_requests=True"),
            ({"sampling": "none"}, "known are paired, maximal"),
        ],
    )
    def test_bad_arguments(self, model: Any, options: dict[str, Any], said: str) -> None:
        requests = [recorded(model, 0)]
        with pytest.raises(ConfigurationError, match=said):
            confirm(model, None, ["ngram"], NGRAM, requests, by_id(requests), **options)

    def test_a_source_that_is_missing_is_named(self, model: Any) -> None:
        requests = [recorded(model, 0)]
        with pytest.raises(ConfigurationError, match="needs draft source 'suffix'"):
            confirm(model, None, ["ngram"], Fixed("suffix", block_length=2), requests, by_id(requests))


class TestOutputs:
    def test_greedy_answers_that_part_are_counted_and_said(
        self, model: Any, script: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        requests = [recorded(model, number) for number in range(3)]

        def parting(arm: str, request: TrafficRequest, options: dict[str, Any]) -> Answer:
            last = request.output[-1]
            has_parted = arm == "on" and request.request_id != "r0"
            tokens = (*request.output[:-1], (last + 1) % tiny.VOCAB if has_parted else last)
            return Answer(tokens, 1.0, 0.5, "greedy")

        script.say = parting
        gaps = {requests[1].output: 0.0, requests[2].output: 5.0}

        def examine(target: Any, prompt: Any, expected: Any, found: Any) -> Difference:
            return Difference(TOKENS - 1, expected[-1], found[-1], gaps[expected], tolerance=0.1)

        with monkeypatch.context() as patched:
            patched.setattr(module, "examine", examine)
            found = confirm(model, None, ["ngram"], NGRAM, requests, by_id(requests))
        assert (found[-1].same_output, found[-1].ties, found[-1].different) == (1, 1, 1)
        text = "\n".join(confirm_lines(found))
        assert "1 of 3 answers were the plain one token by token" in text
        assert "1 parted at a numerical tie" in text
        assert "1 parted by more than rounding, which is a fault" in text
        found = confirm(model, None, ["ngram"], NGRAM, requests, by_id(requests))  # examined by the model itself
        assert found[-1].different == 2

    def test_lines(self, model: Any, script: SimpleNamespace) -> None:
        requests = [recorded(model, 0, "chat"), recorded(model, 1, "\x1b[31m")]
        script.say = lambda arm, request, options: Answer(request.output, 4.0 if arm == "off" else 2.0, 0, "greedy")
        found = confirm(model, None, ["ngram"], NGRAM, requests, by_id(requests, off=5.0, on=1.0))
        text = "\n".join(confirm_lines(found))
        assert "\x1b" not in text
        row = next(line for line in text.splitlines() if line.startswith("all"))
        assert row.split() == [
            "all", "2", "3.00x", "(of", "2)", "2.00x", "(of", "2)", "+50.0", "%",
        ]  # fmt: skip
        assert "8.0 s plainly, 4.0 s under the policy" in text
        assert "parted" not in text


class Failing(Noting):
    """Raises in one of the requests, before one of its blocks."""

    def __init__(self, error: BaseException, prompt_tokens: int) -> None:
        super().__init__(Action("ngram", 2))
        self._error, self._prompt_tokens = error, prompt_tokens

    def choose(self, context: Any) -> Action:
        if context.request.prompt_tokens == self._prompt_tokens and context.output_tokens > 3:
            raise self._error
        return super().choose(context)


class TestErrors:
    @pytest.mark.parametrize("place", [0, 1])
    def test_one_request_costs_itself_and_is_said(self, model: Any, place: int) -> None:
        requests = [recorded(model, number) for number in range(3)]
        requests[place] = replace(requests[place], prompt=(*requests[place].prompt, 5))
        policy = Failing(RuntimeError("out of\nmemory"), len(requests[place].prompt))
        seen: list[Compared] = []
        found = confirm(model, None, ["ngram"], policy, requests, by_id(requests), progress=seen.append)
        assert [each.error for each in seen].count(None) == 2
        assert seen[place].error == "RuntimeError: out of memory"
        assert found[-1].requests == 2
        assert found[-1].errors == (f"r{place}: RuntimeError: out of memory",)
        said = f"1 request failed and counts nowhere; the first is r{place}: RuntimeError: out of memory"
        assert list(confirm_lines(found))[-1] == said
        assert "generate" not in vars(model)

    def test_none_that_can_be_decoded(self, model: Any) -> None:
        request = replace(recorded(model, 0), prompt=(1, 10_000))
        with pytest.raises(AutospecError, match="none of 1 requests could be decoded: IndexError"):
            confirm(model, None, ["ngram"], NGRAM, [request], by_id([request]))
        assert "generate" not in vars(model)
        with pytest.raises(AutospecError, match="none of 0"):
            summary([], {})

    def test_what_is_not_decoded_by_blocks_is_no_measurement(self, model: Any) -> None:
        request = recorded(model, 0, num_beams=2)
        with (
            pytest.warns(UserWarning, match="left to the original generate"),
            pytest.raises(AutospecError, match="left to the original generate: beam search"),
        ):
            confirm(model, None, ["ngram"], NGRAM, [request], by_id([request]))

    def test_an_interruption_leaves_nothing_wrapped(self, model: Any) -> None:
        requests = [recorded(model, 0)]
        policy = Failing(KeyboardInterrupt(), len(requests[0].prompt))
        with pytest.raises(KeyboardInterrupt):
            confirm(model, None, ["ngram"], policy, requests, by_id(requests))
        assert "generate" not in vars(model)

    def test_a_wrapped_model_is_refused_and_stays_wrapped(self, model: Any) -> None:
        requests = [recorded(model, 0)]
        with autospec.wrap(model, policy="off") as speculator:
            with pytest.raises(ConfigurationError, match="wrapped already"):
                confirm(model, None, ["ngram"], NGRAM, requests, by_id(requests))
            model.generate(tiny.prompt(5), max_new_tokens=2, do_sample=False)
            assert speculator.last_request is not None


class TestExperiment:
    def test_no_live_prompt_is_tuned_on(self, experiment: ModuleType) -> None:
        found = experiment.spread(list(range(40)), 12, 5, "s")
        live = [row for row, is_live in found if is_live]
        assert (len(found), len(live)) == (17, 5)
        assert len({row for row, _ in found}) == 17
        assert max(live) - min(live) > 20
        with pytest.raises(ConfigurationError, match="17 are needed"):
            experiment.spread(list(range(10)), 12, 5, "s")

    def test_a_missing_file_of_prompts_is_named(
        self, experiment: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("sys.argv", ["run.py", "--prompts", "nowhere.jsonl"])
        with pytest.raises(SystemExit):
            experiment.parse_options()
        assert "nowhere.jsonl: no such file" in capsys.readouterr().err

    def test_replicas_are_made_of_the_scores_of_one_segment(self, experiment: ModuleType) -> None:
        def scores(number: int, segment: str, length: int) -> ScoredRequest:
            numbers = np.arange(length, dtype=np.float32) + 100 * number
            draft = DraftScores(numbers, numbers, numbers, numbers.astype(np.int16))
            right = np.arange(length, 0, -1, dtype=np.int16)
            offer = OfferScores(right, right, right, tuple((float(each),) for each in numbers))
            return ScoredRequest(
                f"r{number}", WHEN, segment, 9, length, length, False, 0.0, {"assistant": draft}, {"ngram": offer}
            )

        requests = [scores(0, "a", 5), scores(1, "b", 30), scores(2, "a", 4)]
        made = experiment.replicas(requests, 4, 10)
        assert len({each.request_id for each in made}) == 4
        assert [each.segment for each in made] == ["a", "b", "a", "b"]
        assert all(each.output_tokens == len(each.drafts["assistant"].accept) == 10 for each in made)
        assert made[0].drafts["assistant"].accept.tolist() == [0, 1, 2, 3, 4, 201, 202, 203, 1, 2]
        assert made[0].offers["ngram"].scores[5] == (201.0,)
        assert made[2].drafts["assistant"].accept.tolist() == [200, 201, 202, 203, 1, 2, 3, 4, 201, 202]
        assert made[1].offers["ngram"].num_right.tolist() == list(range(10, 0, -1))  # nothing beyond the end

    def test_bars(self, experiment: ModuleType) -> None:
        results = {
            "segments": 6,
            "segments_within": {"tuned": 5},
            "tuned_over_best_fixed": {"ratio": 1.0},
            "worst_segment": ["qa", 0.98],
            "tuning_seconds": {"scoring": 500.0, "search": 100.0},
            "tuning_time": {"requests": 500, "tokens": 128, "search": 590.0, "choice": 9.0},
        }
        assert [each["is_met"] for each in experiment.bars(results)] == [True] * 5
        missed = {
            "segments": 6,
            "segments_within": {"tuned": 4},
            "tuned_over_best_fixed": {"ratio": 0.999},
            "worst_segment": ["qa", 0.979],
            "tuning_seconds": {"scoring": 601.0},
            "tuning_time": {"requests": 500, "tokens": 128, "search": 599.0, "choice": 9.0},
        }
        assert [each["is_met"] for each in experiment.bars(missed)] == [False] * 5
