"""Walking along recorded answers gives the blocks that live decoding has: exactly, or in law where drafts are drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

import autospec
from autospec.certify.cases import Costs, FollowingAcceptance, Stopping, Switching
from autospec.certify.synthetic import SyntheticModel, random_table
from autospec.drafts import Assistant, EarlyExit, NGram, Suffix
from autospec.errors import ConfigurationError
from autospec.policies import Fixed, Goodput, Policy
from autospec.policies.prices import Prices
from autospec.scores import ScoredRequest, acceptance
from autospec.scores import scorer as scorer_module
from autospec.scores.acceptance import coupled, rejection
from autospec.scores.fixed import walk_fixed
from autospec.scores.folder import ScoreFolder
from autospec.scores.luck import Luck, runs
from autospec.scores.scorer import Scorer
from autospec.scores.walk import by_segment, totals, walk
from autospec.traffic.request import TrafficRequest
from autospec.types import OFF, Action, BlockOutcome

WHEN = datetime(2026, 1, 1, tzinfo=UTC)


class Noting:
    """The policy itself, whose outcomes are kept."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self.name = policy, policy.name
        self.wants_offers = bool(getattr(policy, "wants_offers", False))
        self.outcomes: list[BlockOutcome] = []

    def choose(self, context: Any) -> Action:
        return self._policy.choose(context)

    def observe(self, outcome: BlockOutcome) -> None:
        self.outcomes.append(outcome)
        self._policy.observe(outcome)


def traffic(prompt: Any, output: Any, **options: Any) -> TrafficRequest:
    return TrafficRequest(
        request_id=f"{len(prompt)}-{sum(output)}-{options.get('number', 0)}",
        started_at=WHEN,
        segment="s",
        prompt=tuple(prompt),
        output=tuple(output),
        options={name: value for name, value in options.items() if name != "number"},
    )


def blocks(outcomes: list[BlockOutcome]) -> list[tuple[Any, ...]]:
    return [
        (
            o.action.label,
            o.context_tokens,
            o.num_draft_tokens,
            o.num_judged_tokens,
            o.num_accepted_tokens,
            o.num_committed_tokens,
            o.offers,
        )
        for o in outcomes
    ]


def sources_of(target: Any) -> list[Any]:
    return [NGram(min_ngram=1), Suffix(min_match=1), Assistant(tiny.llama(seed=1)), EarlyExit(1)]


POLICIES: dict[str, Callable[[], Policy]] = {
    "off": Fixed,
    "ngram": lambda: Fixed("ngram", block_length=4),
    "suffix": lambda: Fixed("suffix", block_length=16),
    "assistant": lambda: Fixed("assistant", block_length=3),
    "early_exit": lambda: Fixed("early_exit", block_length=2),
    "switching": lambda: Switching(Action("assistant", 2), OFF, Action("ngram", 3), Action("early_exit", 1)),
    "goodput": lambda: Goodput(Costs()),
}


class TestGreedy:
    @pytest.mark.parametrize("name", POLICIES)
    def test_blocks_are_those_of_live_decoding(self, name: str) -> None:
        model = tiny.llama()
        live, replayed, requests = Noting(POLICIES[name]()), Noting(POLICIES[name]()), []
        live_sources, scored_sources = sources_of(model), sources_of(model)
        prompts = [torch.tensor([[3, 1, 4, 1, 5, 3, 1, 4]]), torch.tensor([[2, 7, 1, 8, 2, 7]])] * 2
        if name == "goodput":  # what is drafted after a rejection is not known to a walk, and a stop looks at it
            for source in (*live_sources, *scored_sources):
                if not getattr(source, "is_retrieval", False):
                    source.takes_stop = False
        with autospec.wrap(model, drafts=live_sources, policy=live):
            outputs = [model.generate(p, max_new_tokens=30, do_sample=False)[0, p.shape[1] :].tolist() for p in prompts]
        for source in scored_sources:
            source.attach(model, None)
            if not getattr(source, "is_retrieval", False):
                source.takes_stop = True
        scorer = Scorer(model, {source.name: source for source in scored_sources})
        for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            request = traffic(prompt[0].tolist(), output, max_new_tokens=30, do_sample=False)
            requests.append(scorer.score(replace(request, request_id=str(number))))
        if name == "goodput":
            walked = list(_without_stops(replayed, requests))
        else:
            walked = list(walk(replayed, requests, Costs(), luck=Luck()))
        assert blocks(replayed.outcomes) == blocks(live.outcomes)
        assert sum(each.blocks for each in walked) == len(live.outcomes)

    def test_seconds_are_those_of_the_costs(self) -> None:
        model = tiny.llama()
        source = NGram(min_ngram=1)
        source.attach(model, None)
        prompt = [3, 1, 4, 1, 5, 3, 1, 4]
        output = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, 8:].tolist()
        scored = Scorer(model, {"ngram": source}).score(traffic(prompt, output, max_new_tokens=20, do_sample=False))
        noting = Noting(Fixed("ngram", block_length=4))
        (walked,) = walk(noting, [scored], Costs(), luck=Luck(), host_seconds=0.5)
        costs = Costs()
        expected = sum(
            costs.verify_seconds(o.num_draft_tokens + 1, 32)
            + 0.5
            + (costs.draft_seconds("ngram", o.action.block_length, 32) if o.action.block_length else 0.0)
            for o in noting.outcomes
        )
        assert walked.seconds == pytest.approx(expected)
        assert walked.off_seconds == pytest.approx(19 * (costs.verify_seconds(1, 32) + 0.5))
        found = by_segment([walked])["s"]
        assert found == totals([walked])
        assert found.speed_up == pytest.approx(walked.off_seconds / walked.seconds)
        assert found.output_tokens == 20


def _without_stops(policy: Policy, requests: list[ScoredRequest]) -> Any:
    from autospec.scores import walk as module

    for request in requests:
        walking = module._Walk(policy, request, Prices(Costs()), Luck(), 0.0)
        walking._stoppable = frozenset()
        yield walking.run()


@pytest.mark.parametrize(
    "action", [Action(), Action("ngram", 3), Action("suffix", 16), Action("assistant", 2), Action("heads", 2)]
)
def test_the_fast_walk_is_the_walk(action: Action) -> None:
    model = tiny.llama()
    sources = {"ngram": NGram(min_ngram=1), "suffix": Suffix(min_match=1), "assistant": Assistant(tiny.llama(seed=1))}
    scorer, requests = Scorer(model, sources), []
    for number in range(4):
        prompt = torch.tensor([[3, 1, 4, 1, 5, 3, 1, 4 + number]])
        torch.manual_seed(number)
        options = {"max_new_tokens": 40, "do_sample": bool(number % 2)}
        output = model.generate(prompt, **options)[0, 8:].tolist()
        requests.append(replace(scorer.score(traffic(prompt[0].tolist(), output, **options)), request_id=str(number)))
    policy = Fixed(action.source, block_length=action.block_length) if action.source != "heads" else Fixed()
    slow = list(walk(policy, requests, Costs(), luck=Luck(), host_seconds=0.01))
    fast = list(walk_fixed(action, requests, Costs(), luck=Luck(), host_seconds=0.01))
    for one, other in zip(slow, fast, strict=True):
        assert other.seconds == pytest.approx(one.seconds)
        assert other.off_seconds == pytest.approx(one.off_seconds)
        assert replace(one, seconds=0.0, off_seconds=0.0) == replace(other, seconds=0.0, off_seconds=0.0)


# --- in law, where tokens are drawn ---

TARGET, DRAFT = random_table(61, 3), random_table(62, 3, sharpness=2.0)
TOKENS = 5
SAMPLED: dict[str, Callable[[], Policy]] = {
    "assistant": lambda: Fixed("assistant", block_length=2),
    "ngram": lambda: Fixed("ngram", block_length=3),
    "switching": lambda: Switching(Action("assistant", 3), OFF, Action("ngram", 2)),
    "following": lambda: FollowingAcceptance("assistant"),
    "stopping": Stopping,
    "goodput": lambda: Goodput(Costs(), exploration=1.0),
}


def patterns(walks: Any) -> Counter[tuple[int, ...]]:
    return Counter(tuple(each) for each in walks)


def distance(one: Mapping[Any, int], other: Mapping[Any, int]) -> float:
    """Total variation of two sets of counts."""
    total, others = sum(one.values()), sum(other.values())
    return 0.5 * sum(abs(one.get(k, 0) / total - other.get(k, 0) / others) for k in {*one, *other})


class Committed(Noting):
    """Which tokens were committed together, request by request."""

    def __init__(self, make: Callable[[], Policy]) -> None:
        self._make = make
        self.found: list[list[int]] = []
        super().__init__(make())

    def begin(self) -> None:
        super().__init__(self._make())
        self.found.append([])

    def observe(self, outcome: BlockOutcome) -> None:
        super().observe(outcome)
        self.found[-1].append(outcome.num_committed_tokens)


def both(name: str, sampling: str, count: int, lucks: int) -> tuple[Any, Any]:
    """Patterns of live blocks, and of walks along the same answers."""
    target, draft = SyntheticModel(TARGET, 3), SyntheticModel(DRAFT, 3)
    prompt = torch.tensor([[0, 1, 0]])
    live = Committed(SAMPLED[name])
    drafts = [Assistant(draft), NGram(min_ngram=1)]
    requests = []
    with autospec.wrap(target, drafts=drafts, policy=live, sampling=sampling):
        for seed in range(count):
            live.begin()
            generator = torch.Generator().manual_seed(seed)
            output = target.generate(prompt, max_new_tokens=TOKENS, do_sample=True, top_k=0, generator=generator)
            requests.append(traffic(prompt[0].tolist(), output[0, 3:].tolist(), number=seed, **OPTIONS))
    scorer = Scorer(target, {source.name: source for source in drafts}, sampling=sampling)
    known: dict[tuple[int, ...], ScoredRequest] = {}
    replayed = Committed(SAMPLED[name])
    for number, request in enumerate(requests):
        if request.output not in known:
            known[request.output] = scorer.score(request)
        scored = replace(known[request.output], request_id=str(number))
        for seed in range(lucks):
            replayed.begin()
            list(walk(replayed, [scored], Costs(), luck=Luck(seed)))
    return patterns(live.found), patterns(replayed.found)


OPTIONS = {"max_new_tokens": TOKENS, "do_sample": True, "top_k": 0}


@pytest.mark.parametrize("sampling", ["paired", "maximal"])
@pytest.mark.parametrize("name", SAMPLED)
def test_the_law_of_blocks_is_that_of_live_decoding(name: str, sampling: str) -> None:
    """Noise: with 800 live answers and about ten patterns, 0.05 is seldom exceeded by chance."""
    live, replayed = both(name, sampling, count=800, lucks=6)
    assert len(live) > 3
    assert distance(live, replayed) < 0.06


def test_a_wrong_acceptance_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """min(1, p / q) in place of min(1, q / p)."""

    def inverted(target_probs: torch.Tensor, draft_probs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        p, q = (probs.gather(1, tokens[:, None])[:, 0].double() for probs in (target_probs, draft_probs))
        return (p / q).clamp(max=1.0)

    monkeypatch.setattr(acceptance, "rejection", inverted)
    live, replayed = both("assistant", "maximal", count=800, lucks=6)
    assert distance(live, replayed) > 0.1


def test_coupled_draws_agree_as_often_as_is_said() -> None:
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet([0.7] * 6), rng.dirichlet([0.7] * 6)
    noise = rng.exponential(size=(200_000, 6))
    said, drafted = (p / noise).argmax(axis=1), (q / noise).argmax(axis=1)
    expected = coupled(torch.tensor(p).expand(6, -1), torch.tensor(q).expand(6, -1), torch.arange(6)).tolist()
    for token in range(6):
        here = said == token
        if here.sum() > 5_000:
            agreed = (drafted[here] == token).mean()
            assert expected[token] == pytest.approx(agreed, abs=0.02)
    first, second = torch.tensor([0]), torch.tensor([1])
    even, alike = torch.tensor([[0.5, 0.5]]), torch.tensor(p)[None]
    assert coupled(alike, alike, first).tolist() == pytest.approx([1.0])
    assert rejection(even, torch.tensor([[0.25, 0.75]]), first).tolist() == pytest.approx([0.5])
    assert rejection(even, torch.tensor([[0.25, 0.75]]), second).tolist() == [1.0]
    assert rejection(torch.tensor([[1.0, 0.0]]), even, second).tolist() == [1.0]
    assert coupled(even, torch.tensor([[1.0, 0.0]]), second).tolist() == [0.0]


def test_runs_are_counted_from_each_position() -> None:
    assert runs(np.array([True, True, False, True])).tolist() == [2, 1, 0, 1]
    assert runs(np.array([], dtype=bool)).tolist() == []
    assert runs(np.array([False])).tolist() == [0]


def test_luck_follows_from_seed_request_and_source() -> None:
    target, draft = SyntheticModel(TARGET, 3), SyntheticModel(DRAFT, 3)
    scorer = Scorer(target, {"assistant": Assistant(draft)})
    scored = scorer.score(traffic([0, 1, 0], [1, 2, 0, 1, 1, 0, 2, 1, 0, 0], **{**OPTIONS, "max_new_tokens": 10}))
    one, again = Luck(1), Luck(1)
    assert one.runs(scored, "assistant").tolist() == again.runs(scored, "assistant").tolist()
    drawn = {tuple(Luck(seed).runs(scored, "assistant").tolist()) for seed in range(20)}
    assert len(drawn) > 1


class TestScorer:
    def test_chunks_change_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        target, draft = tiny.llama(), tiny.llama(seed=1)
        prompt = [3, 1, 4, 1, 5]
        options = {"max_new_tokens": 40, "do_sample": True, "temperature": 0.9, "top_k": 20, "repetition_penalty": 1.2}
        torch.manual_seed(0)
        output = target.generate(torch.tensor([prompt]), **options)[0, 5:].tolist()
        whole = Scorer(target, {"assistant": Assistant(draft)}).score(traffic(prompt, output, **options))
        monkeypatch.setattr(scorer_module, "CHUNK", 7)
        monkeypatch.setattr("autospec.drafts.assistant._CHUNK", 5)
        parts = Scorer(target, {"assistant": Assistant(draft)}).score(traffic(prompt, output, **options))
        for name in ("accept", "margin", "entropy", "rank"):
            one, other = (getattr(each.drafts["assistant"], name) for each in (whole, parts))
            assert np.allclose(one, other, atol=1e-4)
        assert 0.0 < whole.drafts["assistant"].accept.mean() < 1.0
        assert whole.temperature == pytest.approx(0.9)

    def test_pools_know_the_past_alone(self) -> None:
        target = tiny.llama()
        output = list(range(40, 60))
        scorer = Scorer(target, {"suffix": Suffix(min_match=1)})
        first = scorer.score(traffic([1, 2, 3], output, max_new_tokens=20, do_sample=False))
        second = scorer.score(traffic([1, 2, 3], output, max_new_tokens=20, do_sample=False, number=1))
        assert first.offers["suffix"].num_right.sum() == 0
        assert second.offers["suffix"].num_right.sum() > 0

    def test_what_cannot_be_scored_is_said(self) -> None:
        target = tiny.llama()

        class Unknown:
            name = "unknown"

        with pytest.raises(ConfigurationError, match="unknown cannot be scored"):
            Scorer(target, {"unknown": Unknown()})  # type: ignore[dict-item]
        with pytest.raises(ConfigurationError, match="no answer yet"):
            Scorer(target, {"ngram": NGram()}).score(traffic([1], []))


class TestFolder:
    def scored(self, number: int) -> ScoredRequest:
        target, draft = SyntheticModel(TARGET, 3), SyntheticModel(DRAFT, 3)
        scorer = Scorer(target, {"assistant": Assistant(draft), "ngram": NGram(min_ngram=1)})
        request = traffic([0, 1, 0], [1, 2, 0, 1, 1], **{**OPTIONS, "number": number})
        return replace(scorer.score(request), request_id=str(number))

    def test_what_was_written_is_read(self, tmp_path: Path) -> None:
        folder = ScoreFolder(tmp_path / "scores", {"target": "a"})
        made = [self.scored(number) for number in (2, 0, 1)]
        for each in made:
            folder.add(each)
        again = ScoreFolder(tmp_path / "scores", {"target": "a"})
        found = again.read()
        assert [each.request_id for each in found] == ["0", "1", "2"]
        assert again.done() == {"0", "1", "2"}
        assert again.num_damaged == 0
        for name in ("accept", "margin", "entropy", "rank"):
            ours, theirs = (getattr(each.drafts["assistant"], name) for each in (made[1], found[0]))
            assert np.allclose(ours, theirs, atol=1e-5)
        assert found[0].offers["ngram"].scores == made[1].offers["ngram"].scores
        assert replace(found[0], drafts={}, offers={}) == replace(made[1], drafts={}, offers={})

    def test_a_torn_tail_costs_the_last_one(self, tmp_path: Path) -> None:
        folder = ScoreFolder(tmp_path, {"target": "a"})
        for number in range(3):
            folder.add(self.scored(number))
        path = tmp_path / "scores.jsonl.zst"
        whole = path.read_bytes()
        for cut in (1, 20, 100):
            path.write_bytes(whole[:-cut])
            assert folder.done() == {"0", "1"}
            assert folder.num_damaged == 1
        folder.add(self.scored(7))
        assert folder.done() == {"0", "1", "7"}

    def test_scores_of_something_else_are_refused(self, tmp_path: Path) -> None:
        ScoreFolder(tmp_path, {"target": "a", "sampling": "paired"})
        with pytest.raises(ConfigurationError, match=r"other settings \(target\)"):
            ScoreFolder(tmp_path, {"target": "b", "sampling": "paired"})
        with pytest.raises(ConfigurationError, match="holds no scores"):
            ScoreFolder(tmp_path / "nothing")
        (tmp_path / "scores.json").write_text("{")
        with pytest.raises(ConfigurationError, match="damaged"):
            ScoreFolder(tmp_path)
