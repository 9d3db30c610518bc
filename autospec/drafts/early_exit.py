"""The target's own first layers draft, with its final norm and head: no other weights, no other vocabulary."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autospec.caches import append, first_layers_of_cache, new_cache
from autospec.drafts.assistant import Assistant, AssistantSession
from autospec.drafts.base import DraftRequest, DraftSession, Proposal
from autospec.errors import ConfigurationError, DraftError
from autospec.types import Stop

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class EarlyExit:
    """Drafts with the first layers of the target.

    The weights are the target's own, shared and never changed. Each block goes on from the target's cache where its
    layers keep all tokens, in a copy that shares what is there. Elsewhere the draft has a cache of its own, so that the
    prompt is run through these layers once more.

    Args:
        num_layers: how many, at least 1 and fewer than the target has; None: chosen when the model is wrapped, by what
            the first layers agree to and take on text that the target writes (`autospec.drafts.exit_choice`).
        greedy, min_margin, max_entropy: as for `Assistant`.

    Raises:
        ConfigurationError: a setting is out of range.

    Source: Elhoushi et al. 2024, LayerSkip, without its training.
    """

    name = "early_exit"
    takes_stop = True
    catches_up = False  # mostly: it goes on from the target's cache

    def __init__(
        self,
        num_layers: int | None = None,
        *,
        greedy: bool = False,
        min_margin: float | None = None,
        max_entropy: float | None = None,
    ) -> None:
        is_number = isinstance(num_layers, int) and not isinstance(num_layers, bool)
        if num_layers is not None and not (is_number and num_layers >= 1):
            raise ConfigurationError(f"EarlyExit({num_layers!r}): a whole number of at least 1, or None, is needed")
        self.num_layers = num_layers
        self._is_to_choose = num_layers is None
        self._options: dict[str, Any] = {"greedy": greedy, "min_margin": min_margin, "max_entropy": max_entropy}
        self._assistant: Assistant | None = None

    def attach(self, target: PreTrainedModel, tokenizer: Any | None) -> None:
        if self._is_to_choose:
            from autospec.drafts.exit_choice import choose_num_layers  # it needs first_layers_of

            self.num_layers = choose_num_layers(target)
        assert self.num_layers is not None
        self._assistant = Assistant(first_layers_of(target, self.num_layers), tokenizer=tokenizer, **self._options)
        self._assistant.attach(target, tokenizer)

    def start(self, request: DraftRequest) -> DraftSession:
        if self._assistant is None or self.num_layers is None:
            raise DraftError("early_exit has no target yet: it is attached by autospec.wrap")
        session = self._assistant.start(request)
        return session if request.target_cache is None else EarlyExitSession(session, request, self.num_layers)


class EarlyExitSession:
    """Drafts from the first layers of the target's cache where that can be done, with one of its own elsewhere."""

    def __init__(self, session: AssistantSession, request: DraftRequest, num_layers: int) -> None:
        self._session = session
        self._request = request
        self._num_layers = num_layers

    def propose(self, committed: Sequence[int], block_length: int, stop: Stop | None = None) -> Proposal:
        assert self._request.target_cache is not None
        num_cached = len(committed) - 1
        view = first_layers_of_cache(self._request.target_cache(), self._num_layers, num_cached)
        if view is None:
            return self._session.propose(committed, block_length, stop)
        self._session.lend(view, list(islice(committed, num_cached)))
        try:
            return self._session.propose(committed, block_length, stop)
        finally:
            self._session.take_back()


def first_layers_of(target: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """A model of the target's first layers that shares its weights and leaves it as it is.

    Raises:
        DraftError: it has not more layers than that, or is built in a way that this cannot follow.
    """
    kind = type(target).__name__
    total = int(target.config.get_text_config(decoder=True).num_hidden_layers)
    if num_layers >= total:
        raise DraftError(f"early_exit of {num_layers} layers: {kind} has {total}, fewer are needed")
    decoder = target.get_decoder()
    lists = [(name, child) for name, child in decoder.named_children() if isinstance(child, nn.ModuleList)]
    names = [name for name, child in lists if len(child) == total]
    path = next((path for path, module in target.named_modules() if module is decoder), None)
    if len(names) != 1 or not path or target.config.get_text_config(decoder=True) is not target.config:
        raise DraftError(f"early_exit cannot follow how {kind} is built: it has no single list of its {total} layers")
    if any("forward" in vars(module) for module in (target, decoder)):  # bound to the whole model, in any copy of it
        raise DraftError(f"early_exit cannot follow {kind}: its forward was replaced (by device hooks, perhaps)")
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:num_layers]
    draft = _shallow(target, config)
    holder = draft
    for name in path.split("."):
        child = _shallow(holder.get_submodule(name), config)
        holder._modules[name] = child
        holder = child
    holder._modules[names[0]] = nn.ModuleList(list(getattr(decoder, names[0]))[:num_layers])
    _try_out(draft, kind)
    return draft


def _shallow(module: Any, config: Any) -> Any:
    """A module of its own with the same parts; what is put in it later does not show in the original."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    if hasattr(twin, "config"):
        twin.config = config
    return twin


@torch.no_grad()
def _try_out(draft: PreTrainedModel, kind: str) -> None:
    tokens = torch.zeros((1, 2), dtype=torch.long, device=draft.device)
    try:
        append(draft, tokens, new_cache(draft))
    except Exception as error:
        raise DraftError(
            f"early_exit cannot run the first layers of {kind}: {type(error).__name__}: {error}"
        ) from error
