"""Are two forwards over the same tokens the same, but for rounding?"""

from __future__ import annotations

import torch
from torch import Tensor

# relative to the largest logit; a fault changes logits by as much as they are apart, rounding by far less
_TOLERANCE = {torch.bfloat16: 0.2, torch.float16: 0.05, torch.float32: 1e-2, torch.float64: 1e-6}


def agree(found: Tensor, expected: Tensor) -> bool:
    """Args: found, expected: logits, [n, vocab_size], of one dtype; infinite ones must be the same."""
    difference = (found - expected).abs().masked_fill(found == expected, 0.0)
    scale = float(expected.abs().masked_fill(expected.isinf(), 0.0).amax().clamp(min=1e-6))
    return bool((difference.amax() <= _TOLERANCE.get(found.dtype, 0.2) * scale).item())
