"""Which logits processors may also shape a draft's own logits.

The target's processors are called exactly as plain decoding calls them: once per committed token, in order, with that
token's own prefix. So any processor is safe there, also one that keeps state. A draft calls processors for tokens that
may be rejected, so only those known to be pure functions of prefix and scores may shape it; the draft is merely less
often accepted for each one left out.
"""

from __future__ import annotations

import transformers
from transformers import LogitsProcessorList

PURE = (
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "MinPLogitsWarper",
    "TemperatureLogitsWarper",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor",
)

_PURE_TYPES = {getattr(transformers, name) for name in PURE if hasattr(transformers, name)}


def pure_processors(processors: LogitsProcessorList) -> LogitsProcessorList:
    """Those of the target's processors that may shape a draft's logits, in the same order."""
    return LogitsProcessorList(p for p in processors if type(p) in _PURE_TYPES)
