"""Layers trained to read the target's hidden states draft: its own multi-token-prediction layers, or a DFlash model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from autospec.caches import why_not_rollback
from autospec.drafts.base import DraftRequest, Proposal
from autospec.drafts.dflash import SETTINGS, DFlashHead
from autospec.drafts.drawing import Drawing
from autospec.drafts.head import Head, HeadState
from autospec.drafts.mtp import MtpHead
from autospec.errors import ConfigurationError, DraftError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class Heads:
    """Drafts with layers that read the target's hidden states, which cost nothing: the target makes them anyway.

    A block is never longer than what the layers were trained for, one token for each multi-token-prediction layer, or
    DFlash's window; a longer block length asks for no more.

    Args:
        model: a DFlash model made for the target; None: the multi-token-prediction layers in the target's checkpoint.
        greedy: draft the likeliest token also when the target samples (a one-hot q).

    Raises:
        ConfigurationError: `model` is no DFlash model of transformers, or a setting is out of range.
    """

    name = "heads"

    def __init__(self, model: PreTrainedModel | None = None, *, greedy: bool = False) -> None:
        config = getattr(model, "config", None)
        if model is not None and not all(hasattr(config, setting) for setting in SETTINGS):
            raise ConfigurationError(
                f"Heads({type(model).__name__}): a DFlash model of transformers is needed (its config has "
                f"{', '.join(SETTINGS)}), or nothing for the layers in the target's own checkpoint"
            )
        if not isinstance(greedy, bool):
            raise ConfigurationError(f"Heads(greedy={greedy!r}): True or False is needed")
        self.model = model
        self.greedy = greedy
        self._head: Head | None = None
        self._device: torch.device | None = None

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Which hidden states of the target its sessions see."""
        return () if self._head is None else self._head.hidden_layers

    def attach(self, target: PreTrainedModel, tokenizer: Any | None) -> None:
        kind = type(target).__name__
        if target.config.is_encoder_decoder:
            raise DraftError(f"{kind} is an encoder-decoder model: heads draft for decoders alone")
        if len(set(getattr(target, "hf_device_map", {}).values())) > 1:
            raise DraftError(f"{kind} is spread over several devices, heads need it on one")
        head: Head = MtpHead(target) if self.model is None else DFlashHead(self.model, target)
        _try_out(head, target)
        self._head, self._device = head, target.device

    def start(self, request: DraftRequest) -> HeadsSession:
        if self._head is None:
            raise DraftError("heads have no target yet: they are attached by autospec.wrap")
        if request.device != self._device:
            raise DraftError(
                f"the heads are on {self._device}, the target has moved to {request.device}: wrap it again"
            )
        return HeadsSession(self._head, request, is_greedy=self.greedy or not request.do_sample)


class HeadsSession:
    """Sees the target's hidden states of one request, and keeps them until a block is asked for."""

    def __init__(self, head: Head, request: DraftRequest, *, is_greedy: bool) -> None:
        self._state: HeadState = head.start()
        self._most_tokens = head.most_tokens
        self._request = request
        self._is_greedy = is_greedy
        self._num_seen = 0
        self._num_run = 0
        self._failure: DraftError | None = None  # of the last block, after tokens were drawn

    @torch.no_grad()
    def see(self, hidden_states: Sequence[Tensor]) -> None:
        """Args: hidden_states: for each of the source's `hidden_layers`, [n, hidden_size]."""
        self._state.see(torch.cat(list(hidden_states), dim=-1))
        self._num_seen += len(hidden_states[0])

    @torch.no_grad()
    def propose(self, committed: Sequence[int], block_length: int) -> Proposal:
        if self._failure is not None:
            raise self._failure
        if self._num_seen != len(committed) - 1:
            raise DraftError(
                f"the target's hidden states were seen for {self._num_seen} of {len(committed) - 1} tokens: those of a "
                "prompt that came in a cache, or was run in chunks, are not there"
            )
        num_tokens = min(block_length, self._most_tokens)
        drawing = Drawing(self._request, committed, is_greedy=self._is_greedy)
        catch_up_seconds = 0.0
        try:
            catch_up_seconds = self._catch_up(committed, num_tokens)
            self._state.begin(committed, num_tokens)
            while len(drawing.tokens) < num_tokens and drawing.draw(self._state.logits(drawing.tokens)[None]):
                pass
        except Exception as error:  # noqa: BLE001  # becomes a DraftError, now or at the next call
            self._failure = drawing.failed(error)
        self._num_run = self._num_seen
        return drawing.proposal(catch_up_seconds)

    def _catch_up(self, committed: Sequence[int], num_tokens: int) -> float:
        """Run what other sources committed meanwhile, so that drafting costs what it always costs."""
        if self._num_seen - self._num_run <= self._most_tokens + 1:  # a block of its own commits as many
            return 0.0
        started = time.perf_counter()
        self._state.catch_up(committed, num_tokens)
        return time.perf_counter() - started


@torch.no_grad()
def _try_out(head: Head, target: PreTrainedModel) -> None:
    """Draft twice from the target's own hidden states.

    Raises:
        DraftError: that fails, or what was run cannot be taken back.
    """
    kind, layers = type(target).__name__, list(head.hidden_layers)
    tokens = torch.zeros((1, 4), dtype=torch.long, device=target.device)
    state = head.start()
    try:
        outputs = target(input_ids=tokens, use_cache=False, return_dict=True, output_hidden_states=layers)
        states = torch.cat([outputs.hidden_states[layer][0] for layer in layers], dim=-1)
        for start, end in ((0, 2), (2, 3)):
            state.see(states[start:end])
            state.begin([0] * (end + 1), head.most_tokens)
            for k in range(head.most_tokens):
                state.logits([0] * k)
    except Exception as error:
        text = " ".join(str(error).split())
        raise DraftError(f"heads cannot draft for {kind}: {type(error).__name__}: {text:.300}") from error
    if why := why_not_rollback(state.cache):
        raise DraftError(f"heads cannot draft for {kind}: {why}")
