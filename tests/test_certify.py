"""The certifier proves the production code exact, and finds planted faults."""

from __future__ import annotations

import inspect
import warnings
from collections import defaultdict
from fractions import Fraction
from typing import Any

import pytest
import torch
import transformers
from transformers import LogitsProcessor, LogitsProcessorList

from autospec import policies
from autospec.certify import BOUND, Case, SyntheticModel, certify, constant_table, quick_cases, random_table
from autospec.certify.cases import POLICIES, PROCESSORS
from autospec.certify.noise import EnumeratedNoise, Path, every_branch
from autospec.decoding.answer import Answer
from autospec.decoding.processors import PURE, BlockProcessors
from autospec.decoding.selection import Maximal, Selection, target_probs
from autospec.decoding.target import TargetSession
from autospec.decoding.verification import Verification
from autospec.drafts import Assistant, Blend, NGram, Proposal
from autospec.drafts.assistant import AssistantSession
from autospec.drafts.blend import BlendSession
from autospec.policies import Fixed

pytestmark = pytest.mark.compat

CASES = list(quick_cases())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_exact(case: Case) -> None:
    certificate = next(certify([case]))
    assert certificate.is_exact, certificate


class TestCoverage:
    def test_every_policy(self) -> None:
        """A new policy has to be certified too."""
        covered = {type(make()) for make in POLICIES.values()}
        known = {
            p for p in vars(policies).values() if inspect.isclass(p) and hasattr(p, "choose") and not _is_protocol(p)
        }
        assert known <= covered

    def test_every_pure_processor_that_shapes_a_draft(self) -> None:
        covered = {type(p).__name__ for make in PROCESSORS.values() for p in make()}
        harmless = {"ForcedBOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor", "LogitNormalization"}
        assert set(PURE) - harmless <= covered

    def test_something_is_accepted_and_something_rejected(self) -> None:
        certificates = list(certify(CASES[:24]))
        assert sum(c.accepted > 0.1 for c in certificates) > 18
        assert all(c.branches >= c.outputs for c in certificates)


def _is_protocol(kind: type) -> bool:
    return bool(getattr(kind, "_is_protocol", False))


def test_the_three_token_example_in_exact_fractions() -> None:
    """p = .6/.3/.1, q = .5/.4/.1: acceptance .90, the residual all on the first token, output p."""
    p, q = [0.6, 0.3, 0.1], [0.5, 0.4, 0.1]
    output: dict[int, float] = defaultdict(float)
    recovered: dict[int, float] = defaultdict(float)

    def run(noise: EnumeratedNoise) -> Selection:
        draft = noise.categorical(torch.tensor(q, dtype=torch.float64))
        return Maximal(noise).select(
            torch.tensor([p], dtype=torch.float64).log(), [draft], torch.tensor([q], dtype=torch.float64)
        )

    for probability, selection in every_branch(run):
        (token,) = selection.tokens
        output[token] += probability
        if not selection.num_accepted:
            recovered[token] += probability

    def exact(number: float) -> Fraction:
        fraction = Fraction(number).limit_denominator(1000)
        assert abs(number - fraction) < 1e-12
        return fraction

    assert exact(1.0 - sum(recovered.values())) == Fraction(9, 10)
    assert {token: exact(value) for token, value in recovered.items() if value > 1e-12} == {0: Fraction(1, 10)}
    assert [exact(output[token]) for token in range(3)] == [Fraction(3, 5), Fraction(3, 10), Fraction(1, 10)]


class TestNoise:
    def test_a_fork_and_its_origin_see_the_same_numbers(self) -> None:
        """Joint law of two draws from shared noise: both marginals are right, and they agree where segments overlap."""
        p, q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.1, 0.3, 0.6])
        joint: dict[tuple[int, int], float] = defaultdict(float)

        def run(noise: EnumeratedNoise) -> tuple[int, int]:
            ahead = noise.fork().categorical(q)
            return ahead, noise.categorical(p)

        for probability, pair in every_branch(run):
            joint[pair] += probability
        for token in range(3):
            assert sum(v for (a, _), v in joint.items() if a == token) == pytest.approx(float(q[token]))
            assert sum(v for (_, b), v in joint.items() if b == token) == pytest.approx(float(p[token]))
        assert joint[0, 0] == pytest.approx(0.1)

    def test_total_probability_is_one(self) -> None:
        def run(noise: EnumeratedNoise) -> int:
            count = 0
            while count < 4 and int(noise.num_successes(torch.tensor([0.7, 0.4]))):
                count += 1 + noise.categorical(torch.tensor([0.5, 0.5, 0.0]))
            return count

        assert sum(p for p, _ in every_branch(run)) == pytest.approx(1.0, abs=1e-14)

    def test_impossible_outcomes_are_not_followed(self) -> None:
        noise = EnumeratedNoise(Path([]))
        assert noise.categorical(torch.tensor([0.0, 1.0, 0.0])) == 1
        assert int(noise.num_successes(torch.tensor([1.0, 1.0, 0.0, 1.0]))) == 2

    def test_after_rewinding_the_same_numbers_are_read_again(self) -> None:
        probs = torch.tensor([[0.5, 0.5], [0.2, 0.8], [0.7, 0.3]])

        def run(noise: EnumeratedNoise) -> bool:
            drawn = noise.walk(probs, [0, 1])
            noise.rewind(1)
            return [noise.categorical(row) for row in probs[1 : len(drawn)]] == drawn[1:]

        assert all(same for _, same in every_branch(run))


# --- planted faults: each must make the certifier report a violation ---


class OddTokens(LogitsProcessor):
    """Depends on the whole prefix, and never twice in the same way."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores + torch.arange(3) * (0.7 * float(input_ids[0, -1]) + 0.2 * input_ids.shape[1])


P, Q = random_table(51, 3), random_table(52, 3)


def a_case(source: Any = None, **options: Any) -> Case:
    draft = SyntheticModel(Q, 3)
    settings = {"policy": lambda: Fixed("assistant", block_length=2), "max_new_tokens": 4, **options}
    return Case("planted", SyntheticModel(P, 3), lambda: {"assistant": source or Assistant(draft)}, **settings)


def violates(case: Case) -> bool:
    certificate = next(certify([case]))
    return certificate.total_variation > 1e3 * BOUND


class AfterRejection(Maximal):
    """Accepts rightly; what the token after a rejection is drawn from is the subclass's."""

    def residual(self, probs: Any, draft_probs: Any, num_accepted: Any) -> Any:
        count = int(num_accepted)
        if count == len(draft_probs):
            return super().residual(probs, draft_probs, num_accepted)
        weights = self.recover(probs[count], draft_probs[count])
        return weights / weights.sum(), weights.sum()

    def recover(self, p: Any, q: Any) -> Any:
        raise NotImplementedError


class FromDraft(AfterRejection):
    def recover(self, p: Any, q: Any) -> Any:
        return q


class FreshFromTarget(AfterRejection):
    def recover(self, p: Any, q: Any) -> Any:
        return p


class AbsoluteDifference(AfterRejection):
    def recover(self, p: Any, q: Any) -> Any:
        return (p - q).abs()


class BonusAfterRejection(Maximal):
    def select(self, scores: Any, draft_tokens: Any, draft_probs: Any) -> Selection:
        tokens = super().select(scores, draft_tokens, draft_probs).tokens
        if len(tokens) < len(scores):  # its logits were computed for the rejected draft token
            tokens = [*tokens, self._randomness.categorical(target_probs(scores)[len(tokens)])]
        return Selection(tokens, len(tokens) - 1)


class InverseRatio(Maximal):
    def num_accepted(self, p: Any, q: Any) -> Any:
        return super().num_accepted(q, p)


class NeighboursResidual(Maximal):
    """The bonus row is used after a rejection."""

    def residual(self, probs: Any, draft_probs: Any, num_accepted: Any) -> Any:
        return super().residual(probs.roll(-1, dims=0), draft_probs, num_accepted)


@pytest.mark.parametrize(
    "rule", [FromDraft, FreshFromTarget, AbsoluteDifference, BonusAfterRejection, InverseRatio, NeighboursResidual]
)
def test_faults_of_selection_are_found(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import autospec.decoding.decoder as decoder_module

    monkeypatch.setattr(decoder_module, "make_rule", lambda *, do_sample, sampling, randomness: rule(randomness))
    assert violates(a_case())


class DrawsBeforeItChooses(BlendSession):
    """A blend that looks at the token it drew before it says whether it drafts at all."""

    def propose(self, committed: Any, block_length: int) -> Proposal:
        drawn = self._model_draft.propose(committed, block_length)
        return drawn if drawn.tokens[:1] == [0] else Proposal([committed[-1]])


@pytest.mark.parametrize("sampling", ["maximal", "paired"])
def test_a_blend_that_chooses_by_what_it_drew_is_found(sampling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In paired sampling no decision can change the text: there it is the same fault, and does no harm."""
    monkeypatch.setattr("autospec.drafts.blend.BlendSession", DrawsBeforeItChooses)
    blend = Blend(Assistant(SyntheticModel(Q, 3)), [NGram()])
    blend.name = "assistant"
    assert violates(a_case(blend, sampling=sampling)) == (sampling == "maximal")


class Tampering:
    """An assistant whose proposal is changed on its way."""

    name = "assistant"

    def __init__(self, change: Any, greedy: bool = False) -> None:
        self._inner = Assistant(SyntheticModel(Q, 3), greedy=greedy)
        self._change = change

    def attach(self, target: Any, tokenizer: Any) -> None:
        pass

    def start(self, request: Any) -> Any:
        self._session = self._inner.start(request)
        return self

    def propose(self, committed: Any, block_length: int) -> Proposal:
        return self._change(self._session.propose(committed, block_length))  # type: ignore[no-any-return]


def one_q_for_all(proposal: Proposal) -> Proposal:
    assert proposal.draft_probs is not None
    return Proposal(proposal.tokens, proposal.draft_probs[:1].expand(len(proposal.tokens), -1))


def drop_second_token_kind(proposal: Proposal) -> Proposal:
    """A stop rule that looks at the drawn token: the trap of the design, one position at a time."""
    keep = next((i for i, token in enumerate(proposal.tokens) if token == 1), len(proposal.tokens))
    return Proposal(
        proposal.tokens[:keep], proposal.draft_probs[:keep] if keep and proposal.draft_probs is not None else None
    )


def trim_unlikely_end(proposal: Proposal) -> Proposal:
    """A drafted block cut afterwards, where its last token had little probability under the draft."""
    assert proposal.draft_probs is not None
    last = len(proposal.tokens) - 1
    keep = last if float(proposal.draft_probs[last, proposal.tokens[last]]) < 0.35 else last + 1
    return Proposal(proposal.tokens[:keep], proposal.draft_probs[:keep] if keep else None)


def smoothed_q(proposal: Proposal) -> Proposal:
    assert proposal.draft_probs is not None
    return Proposal(proposal.tokens, (proposal.draft_probs + 0.1) / 1.3)


@pytest.mark.parametrize("change", [one_q_for_all, drop_second_token_kind, trim_unlikely_end, smoothed_q])
def test_faults_of_drafting_are_found(change: Any) -> None:
    assert violates(a_case(Tampering(change)))


def test_greedy_draft_with_a_full_q_is_found() -> None:
    def full_q(proposal: Proposal) -> Proposal:
        return Proposal(
            proposal.tokens, torch.tensor([[0.3, 0.4, 0.3]], dtype=torch.float64).expand(len(proposal.tokens), -1)
        )

    assert violates(a_case(Tampering(full_q, greedy=True)))


def test_raw_logits_as_q_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    processors = lambda: LogitsProcessorList([transformers.TemperatureLogitsWarper(0.5)])  # noqa: E731
    assert not violates(a_case(processors=processors))
    propose = AssistantSession.propose

    def raw(self: AssistantSession, committed: Any, block_length: int) -> Proposal:
        proposal = propose(self, committed, block_length)
        assert proposal.draft_probs is not None
        unprocessed = proposal.draft_probs**0.5
        return Proposal(proposal.tokens, unprocessed / unprocessed.sum(dim=-1, keepdim=True))

    monkeypatch.setattr(AssistantSession, "propose", raw)
    assert violates(a_case(processors=processors))


@pytest.mark.parametrize("sampling", ["maximal", "paired"])
def test_processors_with_the_wrong_prefix_are_found(sampling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    processors = lambda: LogitsProcessorList([OddTokens()])  # noqa: E731
    assert not violates(a_case(processors=processors, sampling=sampling))
    run = Verification.run

    def with_the_prefix_of_the_block(self: Verification, *args: Any) -> Any:
        right, frozen = self._processors.second_stage, self._answer.tokens.on_device
        self._processors.second_stage = lambda ids, scores: right(frozen, scores)  # type: ignore[method-assign]
        try:
            return run(self, *args)
        finally:
            self._processors.second_stage = right  # type: ignore[method-assign]

    monkeypatch.setattr(Verification, "run", with_the_prefix_of_the_block)
    assert violates(a_case(processors=processors, sampling=sampling))


@pytest.mark.parametrize("sampling", ["maximal", "paired"])
def test_the_neighbours_prefix_in_the_first_stage_is_found(sampling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    processors = lambda: LogitsProcessorList([transformers.RepetitionPenaltyLogitsProcessor(2.5)])  # noqa: E731
    case = a_case(processors=processors, sampling=sampling)
    assert not violates(case)
    first_stage = BlockProcessors.first_stage
    monkeypatch.setattr(
        BlockProcessors, "first_stage", lambda self, ids, scores: first_stage(self, ids.roll(1, dims=1), scores)
    )
    assert violates(case)


@pytest.mark.parametrize("sampling", ["maximal", "paired"])
@pytest.mark.parametrize("num_together", [1, 2, 3])
def test_the_neighbours_prefix_in_the_second_stage_is_found(
    num_together: int, sampling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_together)

    def processors() -> LogitsProcessorList:
        bias = transformers.SequenceBiasLogitsProcessor({(0, 1): 2.0, (1, 2): 2.0, (2, 0): 2.0})
        return LogitsProcessorList([bias, transformers.TopPLogitsWarper(0.7)])

    case = a_case(processors=processors, sampling=sampling)
    assert not violates(case)
    second_stage = BlockProcessors.second_stage
    monkeypatch.setattr(
        BlockProcessors, "second_stage", lambda self, ids, scores: second_stage(self, ids.roll(1, dims=1), scores)
    )
    assert violates(case)


@pytest.mark.parametrize("sampling", ["maximal", "paired"])
def test_an_end_that_is_seen_too_late_is_found(sampling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    append = Answer.append

    def late(self: Answer, *args: Any) -> None:
        append(self, *args)
        self.is_finished = any(bool(c(self.tokens.on_host[:, :-1], None).all()) for c in self._criteria)

    monkeypatch.setattr(Answer, "append", late)
    assert violates(a_case(eos=(1,), sampling=sampling))


@pytest.mark.parametrize("sampling", ["maximal", "paired"])
@pytest.mark.parametrize("off", [-1, 1])
def test_a_cache_that_is_off_by_one_is_found(sampling: str, off: int, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = TargetSession.commit

    def wrong(self: TargetSession, num_tokens: int) -> None:
        if self._width > 1:
            self._width = max(num_tokens, self._width + off)
        commit(self, num_tokens)

    monkeypatch.setattr(TargetSession, "commit", wrong)
    assert violates(a_case(sampling=sampling))


def test_logits_of_the_neighbouring_position_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = TargetSession.forward
    monkeypatch.setattr(TargetSession, "forward", lambda self, *args: forward(self, *args).roll(1, dims=0))
    assert violates(a_case())


def test_a_draft_with_a_wrong_cache_is_only_a_worse_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every fault is one of exactness; the certifier does not cry wolf."""
    draft = Assistant(SyntheticModel(random_table(53, 3, memory=9), 3))
    good = next(certify([a_case(draft)]))
    monkeypatch.setattr(AssistantSession, "_roll_back", lambda self, committed: self._cached.clear())
    certificate = next(certify([a_case(draft)]))
    assert certificate.is_exact
    assert certificate.accepted != pytest.approx(good.accepted)


def test_constant_tables() -> None:
    assert constant_table(0.5, 0.5)([1, 2]) == [0.5, 0.5]


@pytest.mark.parametrize("sampling", ["maximal", "paired"])
def test_a_draft_that_breaks_after_a_drawn_token_still_submits_it(sampling: str) -> None:
    """The overflow follows from the token just drawn, so dropping that token would depend on its own draw."""

    def overflowing(prefix: Any) -> list[float]:
        return [float("nan")] * 3 if prefix[-1] == 1 and len(prefix) > 1 else Q(prefix)

    source = Assistant(SyntheticModel(overflowing, 3))
    case = a_case(source, sampling=sampling, prompt=(0,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is switched off later in the request, and says so
        certificate = next(certify([case]))
    assert certificate.is_exact, certificate
