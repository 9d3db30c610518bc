"""A DFlash model: it fills a window of masked positions at once, beside the target's hidden states.

Source: DFlash, as transformers builds it (`DFlashTokenCandidateGenerator`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autospec.drafts.head import hidden_size_of, of_transformers
from autospec.errors import DraftError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

SETTINGS = ("block_size", "mask_token_id", "target_layer_ids")
"""What the configuration of every DFlash model has."""


class DFlashHead:
    """A DFlash model made for `target`, whose embedding and head it uses.

    Raises:
        DraftError: it is not, or is not where the target is.
    """

    def __init__(self, model: PreTrainedModel, target: PreTrainedModel) -> None:
        self._new_cache = of_transformers("cache_utils", "DFlashCache")
        _check(model, target)
        self._model = model
        self._embedding = _without_norm(target.get_input_embeddings())
        self._output = target.get_output_embeddings()
        # 0 is the embedding's
        self.hidden_layers: tuple[int, ...] = tuple(int(layer) + 1 for layer in model.config.target_layer_ids)
        self.most_tokens = int(model.config.block_size) - 1

    def start(self) -> DFlashState:
        cache = self._new_cache(config=self._model.config)
        cache.activate_past_recording()  # from now on each forward is followed by a crop
        return DFlashState(self._model, cache, self._embedding, self._output)


class DFlashState:
    """The cache holds what the model makes of all hidden states but the last; the window is taken out of it again."""

    def __init__(self, model: Any, cache: Any, embedding: nn.Module, output: nn.Module) -> None:
        self.cache = cache
        self._model = model
        self._embedding = embedding
        self._output = output
        self._waiting: list[Tensor] = []  # hidden states that are not in the cache, in pieces
        self._num_cached = 0
        self._logits: Tensor | None = None

    def see(self, hidden_states: Tensor) -> None:
        self._waiting.append(hidden_states.to(self._model.dtype))

    def catch_up(self, committed: Sequence[int], num_tokens: int) -> None:
        self._run(list(committed[-1:]))

    def begin(self, committed: Sequence[int], num_tokens: int) -> None:
        masks = [int(self._model.config.mask_token_id)] * (int(self._model.config.block_size) - 1)
        out = self._run([committed[-1], *masks])[:, 1 : num_tokens + 1]
        self._logits = self._output(out.to(next(self._output.parameters()).dtype))[0]

    def logits(self, drafted: Sequence[int]) -> Tensor:
        if self._logits is None:
            raise DraftError("no block has begun")
        return self._logits[len(drafted)]

    def _run(self, window: list[int]) -> Tensor:
        """Take in the hidden states that wait. Returns: [1, len(window), hidden_size], of the window after them."""
        device = self._model.device
        context = torch.cat(self._waiting)[None]
        end = self._num_cached + context.shape[1]
        self.cache.set_previous_accepted_tokens(context.shape[1])
        outputs = self._model(
            noise_embeds=self._embedding(torch.tensor([window], device=device)).to(self._model.dtype),
            context_hidden_states=context,
            position_ids=torch.arange(self._num_cached, end + len(window), device=device)[None],
            cache=self.cache,
        )
        # the last is always run again: what a layer with a window keeps is one short of what its mask lets it see
        self.cache.crop(-len(window) - 1)
        self._waiting, self._num_cached = [context[0, -1:]], end - 1
        out: Tensor = outputs.last_hidden_state
        return out


def _check(model: PreTrainedModel, target: PreTrainedModel) -> None:
    config, kind = model.config, type(model).__name__
    if model.device != target.device:
        raise DraftError(
            f"the DFlash model is on {model.device}, the target on {target.device}: "
            f"move it first, model.to({str(target.device)!r})"
        )
    if model.training:
        raise DraftError(f"{kind} is in training mode, where dropout draws random numbers: call eval() on it first")
    sizes = hidden_size_of(model), hidden_size_of(target)
    num_layers = int(target.config.get_text_config(decoder=True).num_hidden_layers)
    num_ids = int(target.get_input_embeddings().weight.shape[0])
    layers, mask = list(config.target_layer_ids), int(config.mask_token_id)
    why = None
    if sizes[0] != sizes[1]:
        why = f"its hidden size is {sizes[0]}, the target's {sizes[1]}"
    elif not layers or not all(0 <= layer < num_layers for layer in layers):
        why = f"it reads the target's layers {layers}, the target has layers 0 to {num_layers - 1}"
    elif not 0 <= mask < num_ids:
        why = f"its mask token is {mask}, the target has ids 0 to {num_ids - 1}"
    elif int(config.block_size) < 2:
        why = f"its window of {config.block_size} leaves nothing to draft"
    if why is not None:
        raise DraftError(f"{kind} was made for another target: {why}")


def _without_norm(embedding: Any) -> Any:
    """The embedding as DFlash models read it; the target's own stays as it is."""
    if not hasattr(embedding, "embed_norm"):
        return embedding
    twin = copy.copy(embedding)
    twin._modules = {**embedding._modules, "embed_norm": nn.Identity()}
    return twin
