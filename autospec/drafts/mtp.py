"""The multi-token-prediction layers that a target's own checkpoint holds.

Layer k reads the hidden state that layer k - 1 (layer 0: the target) made at a position, and the token k + 1 places
further on; it says what follows that token. Its row of a position is settled once that token is committed.

Source: DeepSeek-AI 2024, DeepSeek-V3, section 2.2, as transformers builds it (`MtpModel`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from autospec.drafts.head import hidden_size_of, of_transformers
from autospec.errors import DraftError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class MtpHead:
    """The layers of `target`, read from the checkpoint that it was loaded from; embedding and head are the target's.

    Raises:
        DraftError: there are none, or they cannot be loaded.
    """

    hidden_layers: tuple[int, ...] = (-1,)

    def __init__(self, target: PreTrainedModel) -> None:
        self.model = _load(target)
        self.most_tokens = len(self.model.layers)
        self._hidden_size = hidden_size_of(target)
        self._new_cache = of_transformers("cache_utils", "MtpCache")

    def start(self) -> MtpState:
        cache = self._new_cache(config=self.model.config)
        cache.activate_past_recording()  # from now on each forward is followed by a crop
        return MtpState(self.model, cache, self._hidden_size)


class MtpState:
    """Layer by layer: rows that are settled and cached, and settled inputs that wait for their token or their turn.

    A layer that no block asks for is not run, and its inputs wait; so a short block costs what a short block costs.
    """

    def __init__(self, model: Any, cache: Any, hidden_size: int) -> None:
        self.cache = cache
        self._model = model
        parameter = next(model.layers.parameters())
        self._none = torch.empty((1, 0, hidden_size), dtype=parameter.dtype, device=parameter.device)
        self._waiting = [[self._none] for _ in model.layers]  # inputs of each layer, [1, n, hidden_size], in pieces
        self._num_settled = [0 for _ in model.layers]  # rows in the cache
        self._committed: Sequence[int] = ()
        self._loose = self._none  # rows of the last layer that hang on drafted tokens, [1, n, hidden_size]

    def see(self, hidden_states: Tensor) -> None:
        self._waiting[0].append(hidden_states[None].to(self._none.device, self._none.dtype))

    def catch_up(self, committed: Sequence[int], num_tokens: int) -> None:
        text = committed[:-1]
        for layer in range(num_tokens):
            self._run(layer, text, (), self._none, num_settled_tokens=len(text))

    def begin(self, committed: Sequence[int], num_tokens: int) -> None:
        self._committed, self._loose = committed, self._none

    def logits(self, drafted: Sequence[int]) -> Tensor:
        # the last committed token is always run again, for its logits
        last = len(self._committed) - 1
        out, self._loose = self._run(len(drafted), self._committed, drafted, self._loose, num_settled_tokens=last)
        logits: Tensor = self._model._project_to_logits(out[:, -1:])[0, -1]
        return logits

    def _run(
        self, layer: int, committed: Sequence[int], drafted: Sequence[int], loose: Tensor, *, num_settled_tokens: int
    ) -> tuple[Tensor, Tensor]:
        """Run a layer over the inputs that wait for it and the loose ones after them, as far as the text goes.

        Returns:
            [1, n, hidden_size], all rows that were run, and [1, m, hidden_size], the last of them that are not settled;
            these are taken out of the cache again.
        """
        inputs = torch.cat([*self._waiting[layer], loose], dim=1)
        first = self._num_settled[layer] + layer + 1  # position of the token of the first row
        width = min(inputs.shape[1], len(committed) + len(drafted) - first)
        if width <= 0:
            return self._none, self._none
        tokens = [*committed[first : first + width], *drafted[max(0, first - len(committed)) :]][:width]
        out: Tensor = self._model.forward_layer(
            layer,
            inputs[:, :width],
            torch.arange(first, first + width, device=inputs.device)[None],
            self.cache,
            input_ids=torch.tensor([tokens], device=inputs.device),
        )
        num_settled = max(0, min(width, num_settled_tokens - first))
        self.cache.layers[layer].crop(num_settled - width)
        self._num_settled[layer] += num_settled
        self._waiting[layer] = [inputs[:, num_settled : inputs.shape[1] - loose.shape[1]]]
        if layer + 1 < len(self._waiting):
            self._waiting[layer + 1].append(out[:, :num_settled])
        return out, out[:, num_settled:]


def _load(target: PreTrainedModel) -> Any:
    model_type = of_transformers("modeling_layers", "MtpModel")
    kind = type(target).__name__
    if target.training:
        raise DraftError(f"{kind} is in training mode, where dropout draws random numbers: call eval() on it first")
    if not getattr(target.config.get_text_config(decoder=True), "num_mtp_layers", None):
        raise DraftError(
            f"{kind} has no multi-token-prediction layers (no num_mtp_layers in its config): pass a DFlash model made "
            "for it, Heads(dflash_model), or use another draft source"
        )
    name = str(getattr(target.config, "name_or_path", "") or "")
    if not name:
        raise DraftError(
            f"{kind} was not loaded from a checkpoint, where its multi-token-prediction layers would be: load it with "
            "from_pretrained"
        )
    try:
        device = next(target.get_decoder().layers[-1].parameters()).device
        model = model_type.from_pretrained(target, device_map={"": device})
        if next(model.layers.parameters()).dtype != target.dtype:
            model.layers.to(target.dtype)  # not the whole model: embedding and head are the target's own
        return model.eval()
    except Exception as error:
        text = " ".join(str(error).split())
        raise DraftError(
            f"the multi-token-prediction layers of {kind} could not be loaded from {name}: "
            f"{type(error).__name__}: {text:.300}"
        ) from error
