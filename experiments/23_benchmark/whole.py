"""The packaged assistant for packages that want a draft model with the target's own ids."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent))
sys.path.append(str(Path(__file__).parent.parent.parent))  # 15_live imports autospec

from common import script


def whole_vocabulary(loaded: Any) -> Any:
    """Takes and gives the target's ids; what the assistant does not know has probability 0."""
    return script("15_live").whole_vocabulary(loaded.assistant, loaded.model.config.vocab_size)
