"""The package economize: techniques attached to the target that is loaded already."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import economize
import torch
from economize.techniques.draft_model import DraftModelConfig
from economize.techniques.frspec import FRSpecConfig
from economize.techniques.hybrid import HybridConfig
from economize.techniques.lookup import LookupConfig
from transformers import AutoModelForCausalLM


class Economize:
    """One recipe. Sampling needs the package's verifier `rejection`.

    Args:
        drafter: `none`, `lookup`, `model` (the packaged assistant) or `hybrid` (lookup, else the assistant).
        cycle_length: tokens of a cycle, that of the exact pass included; None: the package's own choice.
        lookup: of its prompt lookup.
        entry: `generate`, as in transformers, or `decode`, with its own samplers.
    """

    def __init__(
        self, loaded: Any, drafter: str, cycle_length: int | None = None, entry: str = "generate", **lookup: Any
    ) -> None:
        self._base = copy.copy(loaded.model)
        self._entry = entry
        techniques: list[Any] = []
        if drafter == "lookup":
            techniques.append(LookupConfig(**lookup))
        elif drafter != "none":
            self._folder = tempfile.TemporaryDirectory()
            ids = _save_whole(loaded, Path(self._folder.name))
            assistant = FRSpecConfig(DraftModelConfig(model=self._folder.name), len(ids), tuple(ids))
            techniques.append(assistant if drafter == "model" else HybridConfig(fallback=assistant, **lookup))
        self._model = economize.apply(self._base, *techniques)
        for technique in self._model.techniques.values():
            for part in technique.modules():
                if (draft := getattr(part, "draft_model", None)) is not None:
                    loaded.count(draft, "draft")
        length = cycle_length or self._model.decoding.cycle_length
        self._decodings = {
            do_sample: economize.DecodeConfig(
                cycle_length=length, verifier="rejection" if do_sample and length > 1 else None
            )
            for do_sample in (False, True)
        }
        end = loaded.model.generation_config.eos_token_id
        self._ends = [end] if isinstance(end, int) else list(end or ())

    def answer(self, ids: Any, segment: str, options: dict[str, Any], max_new_tokens: int) -> list[int]:
        decoding = self._decodings[options["do_sample"]]
        if self._entry == "generate":
            output = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, decoding=decoding, **options
            )
            return output[0, ids.shape[1] :].tolist()
        selector = None
        if options["do_sample"]:
            seed = int(torch.randint(2**31, ()))
            selector = economize.TopPSampler(temperature=options["temperature"], seed=seed)
        result = self._model.decode(ids[0], max_new_tokens, decoding=decoding, selector=selector, stop=self._ends)
        return result.tokens.view(-1).tolist()


def _save_whole(loaded: Any, folder: Path) -> list[int]:
    """The assistant as a model folder over the target's ids, as the package reads draft models.

    Returns:
        The ids that it knows: the package drafts these alone, so that its head is no larger than the assistant's own.
    """
    small = loaded.assistant
    known, unknown = list(small.config.target_token_ids), small.config.unknown_id
    config = copy.deepcopy(small.config)
    config.vocab_size, config.tie_word_embeddings, config.target_token_ids = loaded.model.config.vocab_size, False, None
    whole = AutoModelForCausalLM.from_config(config, dtype=small.dtype)
    weights = dict(small.state_dict())
    rows = weights["model.embed_tokens.weight"]
    inputs = rows[unknown].repeat(config.vocab_size, 1)
    outputs = torch.zeros_like(inputs)
    inputs[known], outputs[known] = rows, rows
    whole.load_state_dict({**weights, "model.embed_tokens.weight": inputs, "lm_head.weight": outputs})
    whole.save_pretrained(folder)
    return [token for number, token in enumerate(known) if number != unknown]


def arm(kind: str, loaded: Any, settings: dict[str, Any]) -> Economize:
    return Economize(loaded, **settings)
