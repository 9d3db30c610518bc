"""transformers' assisted generation with the packaged assistant, under the whole vocabulary."""

from __future__ import annotations

import copy
from typing import Any

from arms_plain import Generate
from whole import whole_vocabulary


def arm(kind: str, loaded: Any, settings: dict[str, Any]) -> Generate:
    """Args: settings: of the assistant's generation configuration; empty: as transformers has it."""
    whole = whole_vocabulary(loaded)
    whole.generation_config = copy.deepcopy(whole.generation_config)
    for name, value in settings.items():
        setattr(whole.generation_config, name, value)
    return Generate(loaded.model, {"assistant_model": whole})
