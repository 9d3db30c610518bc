"""Compares the distribution over whole outputs of the production decoder with the target's own, exactly.

For every sequence of draws the decoder can make, it is run from the start: drafting, verification, stopping, rollback
and learning are the code that runs in production, only randomness and number format are replaced.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from autospec.caches import CACHE_KEYWORD
from autospec.certify.noise import EnumeratedNoise, every_branch
from autospec.certify.synthetic import SyntheticModel
from autospec.controller import Controller
from autospec.decoding.decoder import Decoder
from autospec.drafts.base import DraftSource
from autospec.policies.base import Policy

BOUND = 1e-12
"""Largest total variation, and largest deviation of the total mass from 1, that counts as exact."""

Output = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One thing to certify. What holds state is given as a function that makes it anew for each branch."""

    name: str
    target: SyntheticModel
    sources: Callable[[], Mapping[str, DraftSource]]
    policy: Callable[[], Policy]
    prompt: Output = (0,)
    max_new_tokens: int = 3
    sampling: str = "maximal"
    processors: Callable[[], LogitsProcessorList] = LogitsProcessorList
    eos: tuple[int, ...] = ()
    criteria: Callable[[], list[StoppingCriteria]] = list
    tags: Mapping[str, str] = field(default_factory=dict)  # for the summary: source, policy, processors, stop


@dataclass(frozen=True)
class Certificate:
    """What one case came to."""

    name: str
    total_variation: float
    mass: float
    branches: int
    outputs: int
    accepted: float  # expected accepted draft tokens: a case in which nothing is accepted would show little
    seconds: float

    @property
    def is_exact(self) -> bool:
        return self.total_variation <= BOUND and abs(self.mass - 1.0) <= BOUND


def certify(cases: Iterable[Case], decoder_type: type[Decoder] = Decoder) -> Iterator[Certificate]:
    """Certify case by case.

    Args:
        cases: what to certify.
        decoder_type: the decoder; another one only to see a planted fault found.
    """
    for case in cases:
        started = time.perf_counter()
        expected = target_distribution(case)
        observed: dict[Output, float] = defaultdict(float)
        branches, accepted = 0, 0.0
        for probability, (output, num_accepted) in every_branch(lambda noise: _decode(case, noise, decoder_type)):  # noqa: B023
            observed[output] += probability
            accepted += probability * num_accepted
            branches += 1
        yield Certificate(
            name=case.name,
            total_variation=total_variation(expected, observed),
            mass=sum(observed.values()),
            branches=branches,
            outputs=len(expected),
            accepted=accepted,
            seconds=time.perf_counter() - started,
        )


def target_distribution(case: Case) -> dict[Output, float]:
    """Probabilities of whole outputs under plain decoding: no drafts, no cache, one token at a time."""

    def plain(noise: EnumeratedNoise) -> Output:
        processors, criteria = case.processors(), _criteria(case)
        tokens = list(case.prompt)
        while True:
            ids = torch.tensor([tokens])
            scores = processors(ids, case.target.logits_after(tokens)[None].clone())
            tokens.append(noise.categorical(torch.softmax(scores, dim=-1)[0]))
            if bool(criteria(torch.tensor([tokens]), None).all()):
                return tuple(tokens[len(case.prompt) :])

    distribution: dict[Output, float] = defaultdict(float)
    for probability, output in every_branch(plain):
        distribution[output] += probability
    return distribution


def total_variation(a: Mapping[Output, float], b: Mapping[Output, float]) -> float:
    """Half the sum of absolute differences."""
    return sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in a.keys() | b.keys()) / 2


def _decode(case: Case, noise: EnumeratedNoise, decoder_type: type[Decoder]) -> tuple[Output, int]:
    config = GenerationConfig(do_sample=True, max_length=len(case.prompt) + case.max_new_tokens, use_cache=True)
    decoder = decoder_type(
        segment="certified",
        chooser=Controller(case.policy()),
        sources=case.sources(),
        sampling=case.sampling,
        make_randomness=lambda device: noise,
        scores_dtype=torch.float64,
    )
    with torch.no_grad():
        ids = decoder(
            case.target,
            torch.tensor([case.prompt]),
            logits_processor=case.processors(),
            stopping_criteria=_criteria(case),
            generation_config=config,
            use_cache=True,
            logits_to_keep=1,
            **{CACHE_KEYWORD: DynamicCache()},
        )
    return tuple(ids[0, len(case.prompt) :].tolist()), decoder.tally.num_accepted_tokens


def _criteria(case: Case) -> StoppingCriteriaList:
    criteria = StoppingCriteriaList([MaxLengthCriteria(len(case.prompt) + case.max_new_tokens), *case.criteria()])
    if case.eos:
        criteria.append(EosTokenCriteria(list(case.eos)))
    return criteria
