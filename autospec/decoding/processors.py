"""How logits processors are called for a block of positions.

Any processor is safe when it is called as plain decoding calls it: once per committed token, in order, with that
token's own prefix. Those known to be pure functions of prefix and scores may also be called for positions that are
never committed. So a block's scores are processed in two stages: the first processors, as long as they are pure, for
all positions at once; then the others, position by position, only as far as the answer goes. On the CPU a pure one that
costs much belongs to the second stage too, and when nothing but pure ones does, it takes as many positions at a time as
there are threads: that costs about what one does.

A draft calls processors for tokens that may be rejected, so only pure ones may shape it; the draft is merely less often
accepted for each one left out.
"""

from __future__ import annotations

import copy

import torch
import transformers
from torch import Tensor
from transformers import LogitsProcessorList

SCORES_ALONE = (
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "MinPLogitsWarper",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
)
"""Look at no prefix: one call for all positions of a stage."""

PREFIXES = (
    "EncoderNoRepeatNGramLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
)
"""One call for each position, with its own prefix."""

SUMMING = ("EtaLogitsWarper", "TypicalLogitsWarper")
"""Sum over the vocabulary. On the CPU threads share the sum of one row in another way than those of several, which
changes last bits: one call for each position there."""

COSTLY = (
    "EncoderNoRepeatNGramLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "TopHLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
)
"""Search the prefix or sort the vocabulary: on the CPU, for a position that is not committed, that is a loss."""

PURE = (*SCORES_ALONE, *PREFIXES)


def _types(names: tuple[str, ...]) -> set[type]:
    return {getattr(transformers, name) for name in names if hasattr(transformers, name)}


_PURE_TYPES = _types(PURE)
_SCORES_ALONE_TYPES = _types(SCORES_ALONE)
_SUMMING_TYPES = _types(SUMMING)
_COSTLY_TYPES = _types(COSTLY)


def pure_processors(processors: LogitsProcessorList) -> LogitsProcessorList:
    """Those of the target's processors that may shape a draft's logits, in the same order."""
    return LogitsProcessorList(p for p in processors if type(p) in _PURE_TYPES)


class BlockProcessors:
    """The target's processors, in two stages.

    Args:
        processors: as `generate` prepared them.
        device: where the scores are.

    Attributes:
        num_together: how many positions the second stage takes at a time; None: there is none.
        may_write: there is a processor that might change scores in place.
    """

    def __init__(self, processors: LogitsProcessorList, device: torch.device) -> None:
        on_host = device.type == "cpu"
        first = _PURE_TYPES - _COSTLY_TYPES if on_host else _PURE_TYPES
        is_plain_list = type(processors) is LogitsProcessorList  # another kind of list may call them in its own way
        count = 0
        while is_plain_list and count < len(processors) and type(processors[count]) in first:
            count += 1
        self._all = processors
        self._first = LogitsProcessorList(processors[:count])
        self._second = LogitsProcessorList(processors[count:]) if is_plain_list else processors
        self._one_call = _SCORES_ALONE_TYPES - _SUMMING_TYPES if on_host else _SCORES_ALONE_TYPES
        self.num_together: int | None = 1
        if is_plain_list and count == len(processors):
            self.num_together = None
        elif is_plain_list and all(type(processor) in _PURE_TYPES for processor in self._second):
            self.num_together = torch.get_num_threads()
        self.may_write = not is_plain_list or len(processors) > 0

    def plainly(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """One position, as plain decoding does. Args: input_ids: [1, m]; scores: [1, vocab_size]. Returns: the same."""
        processed: Tensor = self._all(input_ids, scores) if self.may_write else scores
        return processed

    def one_by_one(self) -> BlockProcessors:
        """The same without a first stage."""
        single = copy.copy(self)
        single._first, single._second, single.num_together = LogitsProcessorList(), self._all, 1
        return single

    def first_stage(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """All positions.

        Args:
            input_ids: [1, m + n - 1], the m committed tokens and n - 1 draft tokens.
            scores: [n, vocab_size], one row after each prefix of at least m tokens.

        Returns:
            [n, vocab_size].
        """
        return self._apply(self._first, input_ids, scores)

    def second_stage(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """At most `num_together` positions; arguments and result as in the first stage."""
        if len(scores) == 1:
            processed: Tensor = self._second(input_ids, scores)
            return processed
        return self._apply(self._second, input_ids, scores)

    def _apply(self, processors: LogitsProcessorList, input_ids: Tensor, scores: Tensor) -> Tensor:
        for processor in processors:
            if type(processor) in self._one_call or len(scores) == 1:
                scores = processor(input_ids, scores)
            else:
                committed = input_ids.shape[1] - len(scores) + 1
                scores = torch.cat(
                    [processor(input_ids[:, : committed + i], scores[i : i + 1]) for i in range(len(scores))]
                )
        return scores
