"""Ways to decode that take turns on one model, each with a policy and draft sources of its own."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from autospec.drafts.base import DraftSource
from autospec.drafts.registry import make_sources
from autospec.errors import AutospecError
from autospec.policies.base import Policy, Unmeasured
from autospec.policies.fixed import Fixed
from autospec.policies.registry import make_policy
from autospec.scores.scorer import Scorer
from autospec.speculator import Speculator, wrap
from autospec.traffic import TrafficRequest
from autospec.types import BlockOutcome

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from autospec.costs.model import CostModel

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")


@dataclass(frozen=True, slots=True)
class Answer:
    """What one call of `generate` said and took."""

    tokens: tuple[int, ...]
    seconds: float
    prefill_seconds: float  # of these; on an accelerator as far as the host waited for it
    decoding: str  # as in `greedy` or `sample temperature=0.8`

    def seconds_for(self, num_tokens: int) -> float:
        """The seconds, had it had so many tokens: those after prefill, which gives the first one, in proportion.

        Raises:
            AutospecError: it has one token alone, and so no seconds per token.
        """
        if num_tokens == len(self.tokens):
            return self.seconds
        if len(self.tokens) < 2:
            raise AutospecError(f"an answer of one token cannot be compared with one of {num_tokens}")
        prefill = min(self.prefill_seconds, self.seconds)
        return prefill + (self.seconds - prefill) * (num_tokens - 1) / (len(self.tokens) - 1)


class Arm:
    """One way to decode: a policy, with draft sources of its own.

    The model is wrapped for each answer alone, so that arms can take turns on it. Sources are attached once and the
    policy is an object, so that nothing is measured again.

    Args:
        model, tokenizer: the target, not wrapped.
        policy: taken as it is, and goes on learning; None: plain steps.
        drafts: sources that no other arm has: they learn from the answers of this one.
        sampling: as in `wrap`.
        costs: the policy's, to be corrected by each block as they are in service; None: they stay as they are.
        clock: seconds.

    Raises:
        ConfigurationError: `wrap` would not take them, or the model is wrapped.
        DraftError: a source cannot work with this target.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        policy: Policy | None,
        drafts: Iterable[str | DraftSource] = (),
        *,
        sampling: str = "paired",
        costs: CostModel | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model, self._tokenizer, self._sampling, self._clock = model, tokenizer, sampling, clock
        sources = make_sources(drafts)
        for source in sources.values():
            source.attach(model, tokenizer)
        self._sources: list[Any] = [_Attached(source) for source in sources.values()]
        self._policy: Any = _Served(make_policy(Fixed() if policy is None else policy, sources, Unmeasured), costs)
        with self._wrapped(is_control=False):
            pass  # what is wrong with any of it is known now

    def answer(
        self,
        request: TrafficRequest,
        *,
        seed: int = 0,
        is_control: bool = False,
        learns: bool = True,
        most_tokens: int | None = None,
    ) -> Answer:
        """Decode a recorded prompt with the options that it was decoded with.

        Args:
            request: recorded.
            seed: of the noise that tokens are drawn with.
            is_control: decode plainly, as this policy's controls are.
            learns: sources and policy keep what they see; of policies those that have `state` and `restore` can do
                without.
            most_tokens: of the answer, where the options allow more.

        Raises:
            AutospecError: it was not decoded by blocks. Besides, whatever `generate` raises.
        """
        device = self._model.device
        prompt = torch.tensor([request.prompt], device=device, dtype=torch.long)
        options = recorded_options(request)
        if most_tokens is not None:
            options["max_new_tokens"] = min(most_tokens, int(options.get("max_new_tokens", most_tokens)))
        for source in self._sources:
            source.is_taught = learns
        with self._kept(learns), self._wrapped(is_control=is_control) as speculator:
            _wait_for(device)
            started = self._clock()
            output: Any = self._model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                generator=torch.Generator(device).manual_seed(seed),
                segment=request.segment,
                **options,
            )
            _wait_for(device)
            seconds = self._clock() - started
            record = speculator.last_request
        assert record is not None  # generate has just set it
        if record.fallback_reason is not None:
            raise AutospecError(f"left to the original generate: {record.fallback_reason}")
        tokens = tuple(output[0, len(request.prompt) :].tolist())
        return Answer(tokens, seconds, record.seconds.prefill, record.decoding)

    def _wrapped(self, *, is_control: bool) -> Speculator:
        return wrap(
            self._model,
            tokenizer=self._tokenizer,
            drafts=self._sources,
            policy=self._policy,
            sampling=self._sampling,
            control_share=float(is_control),
            backend="eager",  # one of its own for each answer would be prepared for each
        )

    @contextmanager
    def _kept(self, learns: bool) -> Iterator[None]:
        """Unless it learns, what the policy has learned is afterwards what it was before, where it can be."""
        take, give = (getattr(self._policy, name, None) for name in ("state", "restore"))
        before = copy.deepcopy(take()) if not learns and take is not None and give is not None else None
        try:
            yield
        finally:
            if before is not None and give is not None:
                give(before)


class _Attached:
    """A draft source that is attached already; from answers it learns only when it is to."""

    def __init__(self, source: DraftSource) -> None:
        self._source = source
        self.is_taught = True

    def attach(self, target: PreTrainedModel, tokenizer: Any | None) -> None:
        """It is."""

    def __getattr__(self, name: str) -> Any:
        if name == "learn" and not self.is_taught:
            raise AttributeError(name)
        return getattr(self._source, name)


class _Served:
    """In all else the policy itself, whose costs learn from each block as they do where `wrap` has measured them."""

    def __init__(self, policy: Policy, costs: CostModel | None) -> None:
        self._policy, self._costs = policy, costs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def observe(self, outcome: BlockOutcome) -> None:
        self._policy.observe(outcome)
        if self._costs is not None:
            self._costs.observe(outcome)


def teach(
    model: PreTrainedModel,
    drafts: Iterable[str | DraftSource],
    past: Sequence[TrafficRequest],
    *,
    sampling: str = "paired",
) -> list[DraftSource]:
    """Draft sources that know recorded answers, as they would have in service.

    A walk lets pools know earlier answers alone. So must sources be that are to do live what was walked: new ones,
    taught by the training part. Those that scored the traffic know the very answers that are to come.

    Args:
        model: the target, not wrapped.
        drafts: new sources, as in `wrap`.
        past: answered requests, in order of arrival.
        sampling: as in `wrap`.

    Returns:
        The sources.
    """
    sources = make_sources(drafts)
    scorer = Scorer(model, sources, sampling=sampling)
    for request in past:
        scorer.learn(request)
    return list(sources.values())


def recorded_options(request: TrafficRequest) -> dict[str, Any]:
    """Of `generate`, those of the request: with one bound of the answer, and none on drawing where it is greedy."""
    options: dict[str, Any] = dict(request.options)
    if options.get("do_sample") is False:
        options = {name: value for name, value in options.items() if name not in _SAMPLING}
    if "max_new_tokens" in options:
        options.pop("max_length", None)
    elif "max_length" not in options:
        options["max_new_tokens"] = len(request.output)
    return options


def _wait_for(device: torch.device) -> None:
    """What was asked of an accelerator is done before the clock is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
