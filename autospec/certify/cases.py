"""What is certified: sampling modes, sources, block lengths, policies, processors, stop rules, awkward tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria

from autospec.certify.certifier import Case
from autospec.certify.synthetic import SyntheticModel, Table, constant_table, random_table
from autospec.drafts.assistant import Assistant
from autospec.drafts.base import DraftSource
from autospec.drafts.blend import Blend
from autospec.drafts.ngram import NGram
from autospec.drafts.pool import SuffixPool
from autospec.drafts.suffix import Suffix
from autospec.policies.base import Policy
from autospec.policies.epsilon_greedy import EpsilonGreedy
from autospec.policies.exp3 import Exp3
from autospec.policies.fixed import Fixed
from autospec.policies.goodput import Goodput
from autospec.policies.guard import Guard
from autospec.policies.hedge import Hedge
from autospec.policies.linucb import LinUCB
from autospec.policies.registry import build_policy
from autospec.policies.stopping import MarginalStop
from autospec.policies.thompson import Thompson
from autospec.policies.transformers_constant import TransformersConstant
from autospec.policies.transformers_heuristic import TransformersHeuristic
from autospec.policies.tuned import make_tuned
from autospec.policies.ucb import UCB
from autospec.types import OFF, Action, BlockContext, BlockOutcome

SAMPLING = ("maximal", "paired")


@dataclass(frozen=True)
class Costs:
    """Made-up seconds, under which every action is worth trying."""

    block_lengths: tuple[int, ...] = (1, 2, 3)
    version: int = 0

    def is_extrapolated(self, num_tokens: int, context_tokens: int, source: str | None = None) -> bool:
        return False

    def verify_seconds(self, num_tokens: int, context_tokens: int) -> float:
        return 1.0 + 0.05 * num_tokens

    def draft_seconds(self, source: str, block_length: int, context_tokens: int) -> float:
        return 0.1 * block_length


class Switching:
    """Another source and block length at every block."""

    name = "switching"

    def __init__(self, *actions: Action) -> None:
        self._actions = actions
        self._blocks = 0

    def choose(self, context: BlockContext) -> Action:
        self._blocks += 1
        return self._actions[self._blocks % len(self._actions)]

    def observe(self, outcome: BlockOutcome) -> None:
        """Nothing to learn."""


class FollowingAcceptance:
    """The next block is as long as the last acceptance length: it learns from every outcome."""

    name = "following"

    def __init__(self, source: str) -> None:
        self._source = source
        self._block_length = 2

    def choose(self, context: BlockContext) -> Action:
        return Action(self._source, self._block_length)

    def observe(self, outcome: BlockOutcome) -> None:
        self._block_length = outcome.num_committed_tokens


class Stopping:
    """Blocks that end where the draft is unsure of itself, and longer ones the surer it is."""

    name = "stopping"

    def choose(self, context: BlockContext) -> Action:
        def confident(position: int, margin: float, entropy: float) -> float:
            return min(1.0, margin + 0.5 * entropy + 0.1 * position)

        stop = MarginalStop([0.5] * 3, confident, [0.0, 0.1, 0.2, 0.3], [1.0, 1.3, 1.6, 1.7], rate=1.0)
        return Action("assistant", 3, stop=stop)

    def observe(self, outcome: BlockOutcome) -> None:
        """Nothing to learn."""


def _timed(policy: Policy) -> Policy:
    """The policy itself, which is told made-up seconds: every branch must meet the same policy in the same state."""
    observe, costs = policy.observe, Costs()

    def observe_made_up(outcome: BlockOutcome) -> None:
        action, context = outcome.action, outcome.context_tokens
        observe(
            replace(
                outcome,
                draft_seconds=costs.draft_seconds(action.source, action.block_length, context),
                verify_seconds=costs.verify_seconds(outcome.num_draft_tokens + 1, context),
                correction_seconds=0.0,
                emission_seconds=0.0,
            )
        )

    setattr(policy, "observe", observe_made_up)  # noqa: B010  # its class stays what it is
    return policy


_TUNED = {
    "format": "autospec-policy",
    "version": 1,
    "default": {"source": "none", "block_length": 0},
    "segments": {"certified": {"policy": "ucb", "settings": {"width": 2.0}}},
}

POLICIES: dict[str, Callable[[], Policy]] = {
    "off": Fixed,
    "fixed": lambda: Fixed("assistant", block_length=2),
    "goodput": lambda: Goodput(Costs(), exploration=1.0),
    "auto": lambda: _timed(Guard(Goodput(Costs(), exploration=1.0), Costs(), control_share=0.2, error_rate=0.9)),
    "switching": lambda: Switching(Action("assistant", 2), OFF, Action("ngram", 3), Action("assistant", 1)),
    "following": lambda: FollowingAcceptance("assistant"),
    "stopping": Stopping,
    "epsilon_greedy": lambda: _timed(EpsilonGreedy(Costs(), epsilon=0.5)),
    "ucb": lambda: _timed(UCB(Costs())),
    "thompson": lambda: _timed(Thompson(Costs())),
    "exp3": lambda: _timed(Exp3(Costs())),
    "linucb": lambda: _timed(LinUCB(Costs())),
    "hedge": lambda: _timed(Hedge(Costs())),
    "transformers_constant": lambda: TransformersConstant("assistant", num_assistant_tokens=2),
    "transformers_heuristic": lambda: TransformersHeuristic("assistant", num_assistant_tokens=1),
    "tuned": lambda: _timed(make_tuned(_TUNED, lambda name, settings: build_policy(name, settings, Costs))),
}


class KeepsCount(LogitsProcessor):
    """A user's processor with state: what it does depends on how often it was called."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._calls += 1
        return scores + torch.arange(scores.shape[-1]) * (0.3 * self._calls)


class AfterToken(LogitsProcessor):
    """A mask that switches on once a token has appeared, as a grammar does after a marker."""

    def __init__(self, marker: int, banned: int) -> None:
        self._marker = marker
        self._banned = banned

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._marker in input_ids[0, 1:].tolist():
            scores = scores.clone()
            scores[:, self._banned] = -torch.inf
        return scores


def _make(name: str, *args: Any, **kwargs: Any) -> Callable[[], LogitsProcessorList]:
    return lambda: LogitsProcessorList([getattr(transformers, name)(*args, **kwargs)])


PROCESSORS: dict[str, Callable[[], LogitsProcessorList]] = {
    "temperature 0.5": _make("TemperatureLogitsWarper", 0.5),
    "temperature 2": _make("TemperatureLogitsWarper", 2.0),
    "temperature 0.01": _make("TemperatureLogitsWarper", 0.01),
    "top-k": _make("TopKLogitsWarper", 2),
    "top-p": _make("TopPLogitsWarper", 0.6),
    "min-p": _make("MinPLogitsWarper", 0.4),
    "typical": _make("TypicalLogitsWarper", 0.6),
    "epsilon": _make("EpsilonLogitsWarper", 0.2),
    "eta": _make("EtaLogitsWarper", 0.2, device="cpu"),
    "top-H": _make("TopHLogitsWarper", 0.6),
    "invalid values removed": _make("InfNanRemoveLogitsProcessor"),
    "renormalised": _make("LogitNormalization"),
    "repetition penalty": _make("RepetitionPenaltyLogitsProcessor", 1.7),
    "encoder repetition penalty": _make("EncoderRepetitionPenaltyLogitsProcessor", 1.7, torch.tensor([[0, 1]])),
    "no-repeat n-gram": _make("NoRepeatNGramLogitsProcessor", 2),
    "encoder no-repeat n-gram": _make("EncoderNoRepeatNGramLogitsProcessor", 2, torch.tensor([[0, 1, 1, 2]])),
    "bad words": _make("NoBadWordsLogitsProcessor", [[1, 2], [0, 0]], eos_token_id=None),
    "sequence bias": _make("SequenceBiasLogitsProcessor", [[[1], 1.5], [[2, 1], -2.0]]),
    "min length": _make("MinLengthLogitsProcessor", 3, 2),
    "min new tokens": _make("MinNewTokensLengthLogitsProcessor", 1, 2, 2),
    "forced BOS": _make("ForcedBOSTokenLogitsProcessor", 1),
    "forced EOS": _make("ForcedEOSTokenLogitsProcessor", 4, 2),
    "suppress": _make("SuppressTokensLogitsProcessor", [1]),
    "suppress at begin": _make("SuppressTokensAtBeginLogitsProcessor", [1], 1),
    "length penalty": _make("ExponentialDecayLengthPenalty", (1, 1.5), 2, 1),
    "prefix allowed": _make("PrefixConstrainedLogitsProcessor", lambda batch, ids: [0, 1 + len(ids) % 2], 1),
    "watermark": _make("WatermarkLogitsProcessor", 3, "cpu", 0.5, 2.0),
    "SynthID watermark": lambda: LogitsProcessorList(
        [transformers.SynthIDTextWatermarkLogitsProcessor(3, [11, 5, 7], 64, 0, 16, torch.device("cpu"))]
    ),
    "classifier-free guidance": lambda: LogitsProcessorList(
        [transformers.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.7, SyntheticModel(random_table(23, 3), 3))]
    ),
    "keeps state": lambda: LogitsProcessorList([KeepsCount()]),
    "grammar after marker": lambda: LogitsProcessorList([AfterToken(1, 2)]),
    "several": lambda: LogitsProcessorList(
        [
            transformers.RepetitionPenaltyLogitsProcessor(1.3),
            AfterToken(2, 0),
            transformers.TemperatureLogitsWarper(0.8),
            transformers.TopPLogitsWarper(0.9),
        ]
    ),
}


class LastTwoEqual(StoppingCriteria):
    """Ends when the last two tokens are the same."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return (input_ids[:, -1] == input_ids[:, -2]) & (input_ids.shape[1] > 2)


STOPS: dict[str, dict[str, Any]] = {
    "EOS": {"eos": (1,)},
    "several EOS": {"eos": (0, 2)},
    "EOS ends the prompt": {"eos": (1,), "prompt": (0, 1)},
    "one token": {"max_new_tokens": 1},
    "two tokens": {"max_new_tokens": 2},
    "criterion": {"criteria": lambda: [LastTwoEqual()]},
    "criterion and EOS": {"criteria": lambda: [LastTwoEqual()], "eos": (2,)},
}

_TINY = 1e-12
PAIRS: dict[str, tuple[Table, Table]] = {
    "book": (constant_table(0.6, 0.3, 0.1), constant_table(0.5, 0.4, 0.1)),
    "p has zeros": (constant_table(0.0, 0.7, 0.3), constant_table(0.5, 0.3, 0.2)),
    "q has zeros": (constant_table(0.2, 0.5, 0.3), constant_table(0.0, 0.9, 0.1)),
    "both have zeros": (random_table(1, 3, zeros=0.4), random_table(2, 3, zeros=0.4)),
    "p = q": (random_table(3, 3), random_table(3, 3)),
    "disjoint": (constant_table(0.4, 0.6, 0.0), constant_table(0.0, 0.0, 1.0)),
    "q sharper": (random_table(4, 3), random_table(4, 3, sharpness=4.0)),
    "q flatter": (random_table(5, 3, sharpness=4.0), random_table(5, 3, sharpness=0.3)),
    "tiny p": (constant_table(1.0 - _TINY, _TINY, 0.0), constant_table(0.3, 0.5, 0.2)),
    "tiny q": (constant_table(0.3, 0.5, 0.2), constant_table(1.0 - 2 * _TINY, _TINY, _TINY)),
    "deterministic p": (constant_table(0.0, 1.0, 0.0), constant_table(0.3, 0.4, 0.3)),
    "unrelated": (random_table(6, 3, memory=3), random_table(7, 3, memory=1)),
}


def quick_cases() -> Iterator[Case]:
    """Every axis once; seconds."""
    yield from _distributions(max_new_tokens=3)
    yield from _block_lengths(vocab_size=2, max_new_tokens=4)
    yield from _stop_rules(max_new_tokens=4)
    yield from _vocabularies(max_new_tokens=3)
    yield from _blends(max_new_tokens=4)
    yield from _processors(max_new_tokens=3)
    yield from _stops(max_new_tokens=3)
    yield from _policies(max_new_tokens=4, vocab_size=2)


def full_cases() -> Iterator[Case]:
    """Longer outputs, larger vocabularies, and axes crossed; much longer."""
    yield from _distributions(max_new_tokens=4)
    for vocab_size, tokens in ((2, 6), (3, 4), (5, 3)):
        yield from _block_lengths(vocab_size=vocab_size, max_new_tokens=tokens)
        yield from _policies(max_new_tokens=tokens, vocab_size=vocab_size)
    yield from _stop_rules(max_new_tokens=5)
    yield from _vocabularies(max_new_tokens=4)
    yield from _blends(max_new_tokens=5)
    yield from _processors(max_new_tokens=4)
    yield from _stops(max_new_tokens=4)
    for (name, policy), (stop, options) in product(POLICIES.items(), STOPS.items()):
        for case in _policies(max_new_tokens=4, vocab_size=3, only=(name,)):
            yield replace(case, name=f"{case.name}, {stop}", policy=policy, **options)


_EARLIER = SuffixPool()
_EARLIER.add([1, 0, 1, 1, 0, 0, 1])


def _models(p: Table, q: Table, vocab_size: int) -> tuple[SyntheticModel, SyntheticModel]:
    return SyntheticModel(p, vocab_size), SyntheticModel(q, vocab_size)


def _case(name: str, target: SyntheticModel, draft: SyntheticModel, **options: Any) -> Case:
    return Case(
        name=name,
        target=target,
        sources=lambda: {
            "assistant": Assistant(draft),
            "ngram": NGram(min_ngram=1),
            "suffix": Suffix(_EARLIER, learns=False, min_match=1),
        },
        **options,
    )


def _distributions(max_new_tokens: int) -> Iterator[Case]:
    for (name, (p, q)), sampling in product(PAIRS.items(), SAMPLING):
        target, draft = _models(p, q, 3)
        yield _case(
            f"distributions: {name}, {sampling}",
            target,
            draft,
            policy=POLICIES["fixed"],
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            tags={"distributions": name, "sampling": sampling},
        )


def _block_lengths(vocab_size: int, max_new_tokens: int) -> Iterator[Case]:
    target, draft = _models(random_table(11, vocab_size), random_table(12, vocab_size), vocab_size)
    for source, block_length, sampling in product(("assistant", "ngram", "suffix"), range(1, 6), SAMPLING):
        yield _case(
            f"blocks: {source}:{block_length}, {vocab_size} tokens, {sampling}",
            target,
            draft,
            policy=lambda source=source, block_length=block_length: Fixed(source, block_length=block_length),
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            prompt=(0, 1, 0),
            tags={"source": source, "block length": str(block_length), "sampling": sampling},
        )


STOP_RULES: dict[str, dict[str, Any]] = {
    "margin": {"min_margin": 0.25},
    "entropy": {"max_entropy": 0.9},
    "both": {"min_margin": 0.1, "max_entropy": 0.8},
    "margin, greedy draft": {"min_margin": 0.25, "greedy": True},
}


def _only_assistant(draft: SyntheticModel, options: dict[str, Any]) -> dict[str, DraftSource]:
    return {"assistant": Assistant(draft, **options)}


def _stop_rules(max_new_tokens: int) -> Iterator[Case]:
    """Blocks that the draft itself ends early."""
    target, draft = _models(random_table(13, 3), random_table(14, 3, sharpness=2.0), 3)
    for (name, options), sampling in product(STOP_RULES.items(), SAMPLING):
        case = _case(
            f"stop rule: {name}, {sampling}",
            target,
            draft,
            policy=lambda: Fixed("assistant", block_length=3),
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            tags={"stop rule": name, "sampling": sampling},
        )
        yield replace(case, sources=partial(_only_assistant, draft, options))


VOCABULARIES: dict[str, tuple[int, ...]] = {
    "in another order": (3, 1, 4, 0, 2),
    "three of five": (4, 0, 2),
    "one of five": (1,),
}


def _vocabularies(max_new_tokens: int) -> Iterator[Case]:
    """Drafts with ids of their own, for some of the target's tokens or for all."""
    target = SyntheticModel(random_table(15, 5, sharpness=2.0), 5)
    for (name, ids), processors, sampling in product(VOCABULARIES.items(), ("temperature 0.5", "top-k"), SAMPLING):
        draft = SyntheticModel(random_table(16, len(ids)), len(ids))
        draft.config.target_token_ids = list(ids)
        draft.config.unknown_id = len(ids) - 1
        case = _case(
            f"vocabulary: {name}, {processors}, {sampling}",
            target,
            draft,
            policy=lambda: Fixed("assistant", block_length=2),
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            processors=PROCESSORS[processors],
            tags={"vocabulary": name, "processors": processors, "sampling": sampling},
        )
        yield replace(case, sources=partial(_only_assistant, draft, {}))


def _blends(max_new_tokens: int) -> Iterator[Case]:
    """Retrieval or a model draft, by what they promise: both kinds in one answer."""
    target, draft = _models(random_table(17, 2), random_table(18, 2), 2)
    for block_length, sampling in product((1, 2, 3), SAMPLING):
        case = _case(
            f"blend: length {block_length}, {sampling}",
            target,
            draft,
            policy=lambda block_length=block_length: Fixed("blend", block_length=block_length),
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            prompt=(0, 1, 0),
            tags={"source": "blend", "block length": str(block_length), "sampling": sampling},
        )
        yield replace(case, sources=partial(_only_blend, draft))


def _only_blend(draft: SyntheticModel) -> dict[str, DraftSource]:
    retrieval: list[DraftSource] = [NGram(), Suffix(_EARLIER, learns=False)]
    return {"blend": Blend(Assistant(draft), retrieval)}


def _processors(max_new_tokens: int) -> Iterator[Case]:
    target, draft = _models(random_table(21, 3), random_table(22, 3), 3)
    for (name, processors), sampling in product(PROCESSORS.items(), SAMPLING):
        yield _case(
            f"processors: {name}, {sampling}",
            target,
            draft,
            policy=POLICIES["fixed"],
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            processors=processors,
            eos=(2,) if "length" in name or "EOS" in name or "min" in name else (),
            tags={"processors": name, "sampling": sampling},
        )


def _stops(max_new_tokens: int) -> Iterator[Case]:
    target, draft = _models(random_table(31, 3), random_table(32, 3), 3)
    for (name, options), (source, block_length), sampling in product(
        STOPS.items(), (("assistant", 3), ("ngram", 2)), SAMPLING
    ):
        settings = {"max_new_tokens": max_new_tokens, **options}
        yield _case(
            f"stops: {name}, {source}, {sampling}",
            target,
            draft,
            policy=lambda source=source, block_length=block_length: Fixed(source, block_length=block_length),
            sampling=sampling,
            tags={"stop": name, "source": source, "sampling": sampling},
            **settings,
        )


def _policies(max_new_tokens: int, vocab_size: int, only: Sequence[str] = tuple(POLICIES)) -> Iterator[Case]:
    target, draft = _models(random_table(41, vocab_size), random_table(42, vocab_size), vocab_size)
    for name, sampling in product(only, SAMPLING):
        yield _case(
            f"policies: {name}, {vocab_size} tokens, {sampling}",
            target,
            draft,
            policy=POLICIES[name],
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            prompt=(0, 1, 0),
            tags={"policy": name, "sampling": sampling},
        )
