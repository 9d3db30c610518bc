"""How logits processors are called for a block of positions.

Any processor is safe when it is called as plain decoding calls it: once per committed token, in order, with that
token's own prefix. Those known to be pure functions of prefix and scores may also be called for positions that are
never committed. So a block's scores are processed in two stages: the first processors, as long as they are pure, for
all positions at once; from the first other one on, position by position, only as far as the answer goes.

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
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "MinPLogitsWarper",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
)
"""Look at no prefix, and give each row the bits that it would get alone: one call for all positions."""

ONE_ROW = (
    "EncoderRepetitionPenaltyLogitsProcessor",
    "EtaLogitsWarper",
    "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
)
"""One call for each position, with its own prefix. (Eta sums over the vocabulary, and threads share the sum of one row
in another way than those of several.)"""

COSTLY = (
    "EncoderNoRepeatNGramLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "TopHLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
)
"""One call for each position: they search the prefix, or sort the vocabulary (sorted together, rows may order equals
in another way). On the CPU a position that is not committed would cost more than it could save."""

PURE = (*SCORES_ALONE, *ONE_ROW, *COSTLY)


def _types(names: tuple[str, ...]) -> set[type]:
    return {getattr(transformers, name) for name in names if hasattr(transformers, name)}


_PURE_TYPES = _types(PURE)
_COSTLY_TYPES = _types(COSTLY)
_SCORES_ALONE_TYPES = _types(SCORES_ALONE)


def pure_processors(processors: LogitsProcessorList) -> LogitsProcessorList:
    """Those of the target's processors that may shape a draft's logits, in the same order."""
    return LogitsProcessorList(p for p in processors if type(p) in _PURE_TYPES)


class BlockProcessors:
    """The target's processors, in two stages.

    Args:
        processors: as `generate` prepared them.
        device: where the scores are.

    Attributes:
        rest: the second stage; called as plain decoding calls them.
        is_at_once: there is no second stage.
        may_write: there is one that might change scores in place.
    """

    def __init__(self, processors: LogitsProcessorList, device: torch.device) -> None:
        at_once = _PURE_TYPES if device.type != "cpu" else _PURE_TYPES - _COSTLY_TYPES
        is_plain_list = type(processors) is LogitsProcessorList  # another kind of list may call them in its own way
        count = 0
        while is_plain_list and count < len(processors) and type(processors[count]) in at_once:
            count += 1
        self._all = processors
        self._first = processors[:count]
        self.rest = LogitsProcessorList(processors[count:]) if is_plain_list else processors
        self.is_at_once = is_plain_list and count == len(processors)
        self.may_write = not is_plain_list or len(processors) > 0

    def one_by_one(self) -> BlockProcessors:
        """The same without a first stage."""
        single = copy.copy(self)
        single._first, single.rest, single.is_at_once = LogitsProcessorList(), self._all, False
        return single

    def first_stage(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """All positions.

        Args:
            input_ids: [1, m + n - 1], the m committed tokens and n - 1 draft tokens.
            scores: [n, vocab_size], one row after each prefix of at least m tokens.

        Returns:
            [n, vocab_size].
        """
        for processor in self._first:
            if type(processor) in _SCORES_ALONE_TYPES or len(scores) == 1:
                scores = processor(input_ids, scores)
            else:
                committed = input_ids.shape[1] - len(scores) + 1
                scores = torch.cat(
                    [processor(input_ids[:, : committed + i], scores[i : i + 1]) for i in range(len(scores))]
                )
        return scores
