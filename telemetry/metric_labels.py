"""Label values of metrics: whatever a name from outside holds, there are few of them and they can be shown."""

from __future__ import annotations

import threading

from autospec.errors import ConfigurationError
from autospec.telemetry.labels import visible

OTHER = "other"
"""Stands for every value beyond the bound of its label."""

COLUMNS = 80

# part of a fallback's reason -> its kind; the first that fits
_FALLBACK_KINDS = (
    ("strict=", "strict"),
    ("custom_generate", "custom_generate"),
    ("assistant_model", "assistant"),
    ("assistant_early_exit", "assistant"),
    ("the model drafts for another one", "assistant"),
    ("training mode", "training"),
    ("synced_gpus", "synced_gpus"),
    ("token healing", "token_healing"),
    ("stop strings", "stop_strings"),
    ("encoder-decoder", "encoder_decoder"),
    ("prompt tuning", "prompt_tuning"),
    ("has a generate of its own", "own_generate"),
    ("could not be probed", "probe"),
    ("other logits", "probe"),
    ("no room for blocks", "probe"),
    ("cache", "cache"),
    ("batch of", "batch"),
    ("is decoded by transformers itself", "generation_mode"),
    ("attentions or hidden states", "extra_outputs"),
    ("model input", "model_input"),
)


class BoundedLabel:
    """The values of one label: the first `most` keep their names, all later ones are `other`.

    A name is made fit to be shown and cut to 80 columns. May be asked from several threads.

    Args:
        most: how many values keep their names.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def value(self, name: str) -> str:
        if name in self._known:  # it is shown as it is
            return name
        shown = visible(name, COLUMNS)
        with self._lock:
            if shown not in self._known and len(self._known) >= self._most:
                return OTHER
            self._known.add(shown)
        return shown


def bounded_number(number: int, most: int) -> str:
    """The number as it is up to `most`, and `17+` for all beyond a `most` of 16."""
    return str(number) if number <= most else f"{most + 1}+"


def fallback_kind(reason: str) -> str:
    """A word for why a call was left to the original `generate`; `other` for reasons that this file does not know."""
    return next((kind for part, kind in _FALLBACK_KINDS if part in reason), OTHER)


def at_least_one(name: str, value: int) -> int:
    """The value, if it is a whole number of at least 1.

    Raises:
        ConfigurationError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{name}={value!r}: a whole number of at least 1 is needed")
    return value
