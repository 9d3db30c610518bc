"""Several texts through a causal model at once, as the rows of one matrix that is gone through from left to right.

Shorter texts are padded on the right. A causal model never looks at later tokens, so padding changes no logits of the
text before it, and no attention mask is needed to hide it: all rows are as long in the cache, their positions are the
same, and what a row gives beyond its end is not looked at. A mask would only make some models count positions anew.
That holds for models whose cache keeps plain keys and values. Whether it holds for a model is tried out once, since
states that are carried along, positions that stretch with the longest text, and models that take one row alone would be
wrong without any error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from autospec.caches import CACHE_KEYWORD, find_cache, new_cache, stretches_beyond, why_not_draft_cache
from autospec.decoding.probe import why_not_by_blocks
from autospec.errors import AutospecError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

# relative to the largest logit, as in autospec.decoding.probe
_TOLERANCE = {torch.bfloat16: 0.2, torch.float16: 0.05, torch.float32: 1e-2, torch.float64: 1e-6}
_LENGTHS = (12, 7)
_FIRST = 5  # columns of the first forward when a model is tried out

_known: WeakKeyDictionary[PreTrainedModel, dict[tuple[object, ...], str | None]] = WeakKeyDictionary()


class Rows:
    """Texts of one model and its cache for them, run column by column.

    Args:
        model: causal, one for which `why_one_by_one` has nothing to say.
        texts: of token ids that it knows, none of them empty.
    """

    def __init__(self, model: PreTrainedModel, texts: Sequence[Sequence[int]]) -> None:
        longest = max(map(len, texts))
        # padded with a token of its own: no model warns of it, and every one has an embedding for it
        padded = [[*text, *[text[-1]] * (longest - len(text))] for text in texts]
        self._model = model
        self._ids = torch.tensor(padded, device=model.device)
        self._cache = new_cache(model)

    def run(self, start: int, end: int, logits_kept: int) -> Tensor:
        """Go on with some columns, each once and in their order.

        Args:
            start, end: of the columns, start included.
            logits_kept: for how many of the last of them logits are wanted.

        Returns:
            [rows, logits_kept, vocab_size].

        Raises:
            AutospecError: the model gave another number of rows than it was given.
        """
        tokens = self._ids[:, start:end]
        kwargs = {"logits_to_keep": logits_kept} if self._model._supports_logits_to_keep() else {}
        outputs = self._model(
            input_ids=tokens, use_cache=True, return_dict=True, **{CACHE_KEYWORD: self._cache}, **kwargs
        )
        self._cache = find_cache(outputs)
        logits: Tensor = outputs.logits[:, -logits_kept:]
        if logits.shape[:2] != (len(tokens), logits_kept):
            raise AutospecError(f"{type(self._model).__name__} takes one text at a time")
        return logits


def why_one_by_one(model: PreTrainedModel, num_tokens: int) -> str | None:
    """Why the model must read its texts one by one; None when they may be rows of one forward.

    Args:
        model: a causal language model.
        num_tokens: of the longest text.
    """
    limit = stretches_beyond(model)
    if limit is not None and num_tokens > limit:
        return f"rotary positions stretch beyond {limit} tokens"
    place = (model.device, model.dtype, getattr(model.config, "_attn_implementation", None))
    answers = _known.setdefault(model, {})
    if place not in answers:
        answers[place] = why_not_draft_cache(new_cache(model)) or why_not_by_blocks(model) or _try_out(model)
    return answers[place]


@torch.no_grad()
def _try_out(model: PreTrainedModel) -> str | None:
    """Two texts of different lengths side by side, compared with each by itself."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = int(model.get_input_embeddings().weight.shape[0])
    texts = [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in _LENGTHS]
    try:
        together = _logits(model, texts, _LENGTHS[0])
    except Exception as error:  # noqa: BLE001  # a model that takes one row alone may raise anything
        return f"{type(error).__name__} with two texts at once: {' '.join(str(error).split()):.80}"
    for row, text in enumerate(texts):
        alone = _logits(model, [text], len(text))[0]
        scale = float(alone.abs().amax().clamp(min=1e-6))
        apart = (together[row, : len(alone)] - alone).abs().amax()
        if not bool(apart <= _TOLERANCE.get(alone.dtype, 0.2) * scale):
            return "a text beside another one gives other logits than by itself"
    return None


def _logits(model: PreTrainedModel, texts: Sequence[Sequence[int]], end: int) -> Tensor:
    """[rows, end - _FIRST, vocab_size]."""
    rows = Rows(model, texts)
    rows.run(0, _FIRST, 1)
    return rows.run(_FIRST, end, end - _FIRST)
