"""A causal language model whose next-token distribution is a table, small enough to enumerate.

It is a transformers model with a real cache: the cache's keys are the tokens themselves, and the logits are computed
from what the cache holds. So a cache that is rolled back wrongly shows in the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import ModelOutput

from autospec.caches import CACHE_KEYWORD, find_cache

Table = Callable[[Sequence[int]], list[float]]
"""Next-token probabilities, [vocab_size], after a prefix; may hold zeros."""


class SyntheticConfig(PretrainedConfig):
    model_type = "autospec-synthetic"

    def __init__(self, vocab_size: int = 3, **kwargs: Any) -> None:
        self.vocab_size = vocab_size
        self.num_hidden_layers = 1
        self.num_attention_heads = 1
        self.hidden_size = 1
        self.max_position_embeddings = 64
        super().__init__(**kwargs)


class SyntheticModel(PreTrainedModel, GenerationMixin):
    """Args: table: next-token probabilities after a prefix; vocab_size: their number."""

    config_class = SyntheticConfig
    _no_split_modules: list[str] = []  # noqa: RUF012  # transformers' own form

    def __init__(self, table: Table, vocab_size: int) -> None:
        super().__init__(SyntheticConfig(vocab_size))
        self.embedding = nn.Embedding(vocab_size, 1, dtype=torch.float64)
        self._table = table
        self._known: dict[tuple[int, ...], Tensor] = {}
        self.eval()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.embedding

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing to initialise: the table is given."""

    def logits_after(self, prefix: Sequence[int]) -> Tensor:
        """[vocab_size], float64, without any cache."""
        key = tuple(prefix)
        if key not in self._known:
            self._known[key] = torch.tensor(self._table(key), dtype=torch.float64).log()
        return self._known[key]

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, logits_to_keep: int = 0, **kwargs: Any
    ) -> ModelOutput:
        """Args: input_ids: [1, n]. Returns: logits, [1, n, vocab_size] or the last `logits_to_keep`, and the cache."""
        cache = find_cache(kwargs)
        cache = DynamicCache() if cache is None else cache
        tokens = input_ids.to(torch.float64)[:, None, :, None]
        keys = cache.update(tokens, tokens, 0)[0][0, 0, :, 0]
        if cache.is_compileable and position_ids is not None:  # the rest of its buffers is not written yet
            keys = keys[: int(position_ids[0, -1]) + 1]
        seen = [int(token) for token in keys]
        kept = logits_to_keep or input_ids.shape[1]
        ends = range(len(seen) - kept + 1, len(seen) + 1)
        logits = torch.stack([self.logits_after(seen[:end]) for end in ends])[None]
        return _Output(logits=logits, **{CACHE_KEYWORD: cache})


class _Output(CausalLMOutputWithPast):
    """The class that transformers returns; its cache field is named as in the installed release."""


def random_table(seed: int, vocab_size: int, *, memory: int = 2, sharpness: float = 1.0, zeros: float = 0.0) -> Table:
    """A Markov table drawn once from a seed.

    Args:
        seed: of the table.
        vocab_size: number of tokens.
        memory: how many last tokens matter.
        sharpness: exponent on the probabilities; above 1 sharper, below 1 flatter.
        zeros: share of tokens that get probability 0 (never all of them).
    """

    def table(prefix: Sequence[int]) -> list[float]:
        generator = torch.Generator().manual_seed(hash((seed, *prefix[-memory:])) % 2**31)
        weights = torch.rand(vocab_size, generator=generator, dtype=torch.float64).add(0.05) ** sharpness
        dead = torch.rand(vocab_size, generator=generator) < zeros
        dead[int(torch.randint(vocab_size, (), generator=generator))] = False
        weights[dead] = 0.0
        probs: list[float] = (weights / weights.sum()).tolist()
        return probs

    return table


def constant_table(*probs: float) -> Table:
    """The same distribution after every prefix."""
    return lambda prefix: list(probs)
