"""The rules that choose a token, over every branch of every draw."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest
import tiny
import torch
from transformers import TopKLogitsWarper

import autospec
from autospec.certify.noise import EnumeratedNoise, Path, every_branch
from autospec.decoding.selection import Greedy, Maximal, Paired, make_rule
from autospec.drafts import Assistant
from autospec.errors import ExactnessError
from autospec.policies import Fixed
from autospec.randomness import TorchRandomness

PAIRS = {
    "book": ([0.6, 0.3, 0.1], [0.5, 0.4, 0.1]),
    "equal": ([0.2, 0.5, 0.3], [0.2, 0.5, 0.3]),
    "disjoint": ([0.5, 0.5, 0.0], [0.0, 0.0, 1.0]),
    "zeros": ([0.0, 0.7, 0.3], [0.5, 0.5, 0.0]),
    "sharper": ([0.4, 0.3, 0.3], [0.98, 0.01, 0.01]),
    "flatter": ([0.98, 0.01, 0.01], [0.4, 0.3, 0.3]),
    "tiny": ([1.0 - 1e-12, 1e-12, 0.0], [1e-12, 0.5, 0.5 - 1e-12]),
}


def scores_of(probs: list[float]) -> torch.Tensor:
    return torch.tensor([probs], dtype=torch.float64).log()


def output_of(rule_type: Any, p: list[float], q: list[float], one_hot: int | None = None) -> tuple[list[float], float]:
    """Distribution of the chosen token, and the probability that the draft is accepted."""
    output: dict[int, float] = defaultdict(float)
    accepted = 0.0

    def run(noise: EnumeratedNoise) -> Any:
        draft = noise.categorical(torch.tensor(q, dtype=torch.float64)) if one_hot is None else one_hot
        probs = torch.tensor([q], dtype=torch.float64) if one_hot is None else None
        return rule_type(noise).select(scores_of(p), [draft], probs)

    for probability, selection in every_branch(run):
        (token,) = selection.tokens
        output[token] += probability
        accepted += probability * selection.num_accepted
    return [output[i] for i in range(len(p))], accepted


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("rule_type", [Maximal, Paired])
def test_output_is_the_targets(rule_type: Any, name: str) -> None:
    p, q = PAIRS[name]
    output, accepted = output_of(rule_type, p, q)
    assert sum(abs(a - b) for a, b in zip(output, p, strict=True)) / 2 <= 1e-12
    assert abs(sum(output) - 1.0) <= 1e-12
    if rule_type is Maximal:
        assert accepted == pytest.approx(sum(map(min, p, q)), abs=1e-12)


@pytest.mark.parametrize("name", PAIRS)
def test_one_hot_drafts(name: str) -> None:
    p, q = PAIRS[name]
    for token in range(3):
        for rule_type in (Maximal, Paired):
            output, accepted = output_of(rule_type, p, q, one_hot=token)
            assert output == pytest.approx(p, abs=1e-12)
            assert accepted == pytest.approx(p[token], abs=1e-12)


def test_planted_residual_fault_is_seen() -> None:
    class Forgetful(Maximal):
        def residual(self, probs: Any, draft_probs: Any, num_accepted: Any) -> Any:
            return super().residual(probs, torch.zeros_like(draft_probs), num_accepted)

    output, _ = output_of(Forgetful, *PAIRS["book"])
    assert output == pytest.approx([0.56, 0.33, 0.11], abs=1e-12)


def test_a_draft_token_that_the_draft_could_not_draw_is_an_error() -> None:
    with pytest.raises(ExactnessError, match=r"probability 0\.0 under the draft"):
        Maximal(EnumeratedNoise(Path([]))).select(scores_of([0.5, 0.5]), [0], torch.tensor([[0.0, 1.0]]))


def test_residual_underflow_falls_back_to_the_target_and_is_counted() -> None:
    class Never(TorchRandomness):
        def num_successes(self, probabilities: torch.Tensor) -> torch.Tensor:
            return torch.tensor(0)

    rule = Maximal(Never(torch.device("cpu")))
    p = torch.tensor([[0.25, 0.75]]).log()
    for count in (1, 2):
        assert rule.select(p, [0], p.softmax(-1)).num_accepted == 0
        assert rule.num_residual_underflows == count


def test_greedy_takes_the_first_of_equals_and_of_masked_rows() -> None:
    assert Greedy().select(torch.tensor([[1.0, 3.0, 3.0]]), [2], None) == ([1], 0)
    assert Greedy().select(torch.full((1, 3), -torch.inf), [0], None) == ([0], 1)
    rows = torch.full((4, 70_001), 2.0)  # enough for the work to be split among threads
    rows[2, :9] = -torch.inf
    assert Greedy().select(rows, [0, 0, 9], None) == ([0, 0, 9, 0], 3)


def test_a_fork_draws_what_comes_next_and_uses_nothing_up() -> None:
    for generator in (None, torch.Generator().manual_seed(3)):
        torch.manual_seed(11)
        randomness = TorchRandomness(torch.device("cpu"), generator)
        probs = torch.rand(50)
        fork = randomness.fork()
        ahead = [fork.categorical(probs) for _ in range(20)]
        assert [randomness.categorical(probs) for _ in range(20)] == ahead


def test_make_rule() -> None:
    randomness = TorchRandomness(torch.device("cpu"))
    assert isinstance(make_rule(do_sample=False, sampling="maximal", randomness=randomness), Greedy)
    assert isinstance(make_rule(do_sample=True, sampling="paired", randomness=randomness), Paired)
    assert isinstance(make_rule(do_sample=True, sampling="maximal", randomness=randomness), Maximal)


@pytest.mark.parametrize("probability", [0.0, 0.03, 0.5, 0.97, 1.0])
def test_successes_have_their_frequency(probability: float) -> None:
    torch.manual_seed(0)
    randomness = TorchRandomness(torch.device("cpu"))
    counts = Counter(int(randomness.num_successes(torch.tensor([probability, 1.0, probability]))) for _ in range(4000))
    assert counts[1] == 0
    noise = 0.03 if 0 < probability < 1 else 0.0
    assert counts[0] / 4000 == pytest.approx(1 - probability, abs=noise)
    assert counts[3] / 4000 == pytest.approx(probability**2, abs=noise)


@pytest.mark.parametrize("sampling", ["maximal", "paired"])
def test_sampling_end_to_end(sampling: str) -> None:
    """Vocabulary of 12, top_k 4, a weak draft: frequencies of production code against the exact distribution."""
    draws = 1500
    target, draft = tiny.llama(vocab_size=12), tiny.llama(seed=5, vocab_size=12)
    ids = torch.tensor([[1, 2, 3, 4]])
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for tokens, probability in expected.items():
            with torch.no_grad():
                logits = target(torch.cat([ids, torch.tensor([tokens], dtype=torch.long)], dim=1)).logits[:, -1].float()
            probs = TopKLogitsWarper(4)(ids, logits).softmax(-1)[0]
            longer.update({(*tokens, t): probability * float(probs[t]) for t in probs.nonzero().flatten().tolist()})
        expected = longer

    found: Counter[tuple[int, ...]] = Counter()
    torch.manual_seed(0)
    judged = 0
    with autospec.wrap(
        target, drafts=[Assistant(draft)], policy=Fixed("assistant", block_length=1), sampling=sampling
    ) as speculator:
        for _ in range(draws):
            output = target.generate(ids, max_new_tokens=3, do_sample=True, top_k=4)
            found[tuple(output[0, 4:].tolist())] += 1
            assert speculator.last_request is not None
            judged += speculator.last_request.num_judged_tokens
    assert judged == draws  # the second token is drafted, the third is the bonus or comes from a plain step
    assert set(found) <= set(expected)  # never outside the target's support
    distance = sum(abs(found[key] / draws - p) for key, p in expected.items()) / 2
    noise = sum((p * (1 - p) / draws) ** 0.5 for p in expected.values()) / 2 * 0.8  # what exact draws would show
    assert distance < 1.6 * noise, (distance, noise)
