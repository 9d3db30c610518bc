"""Does the vLLM that is installed take a speculative configuration? Its own classes say so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autospec.errors import ConfigurationError


def check(settings: Mapping[str, Any], target: str, most_requests: int) -> str:
    """Have vLLM make its engine's configuration of it, as for serving. Returns: what was checked.

    Args:
        settings: of `--speculative-config`; empty: none.
        target: model folder or hub id, whose configuration vLLM reads.
        most_requests: that the engine is to serve at once.

    Raises:
        ConfigurationError: vLLM is not installed, or refuses.
    """
    try:
        import vllm
        from vllm import EngineArgs
    except ImportError as error:
        raise ConfigurationError(
            "--check asks the vLLM that is installed, and here is none: run it in vLLM's environment (make vllm)"
        ) from error
    try:
        config = EngineArgs(
            model=target, speculative_config=dict(settings) or None, max_num_seqs=most_requests
        ).create_engine_config()
        if table := settings.get("num_speculative_tokens_per_batch_size"):
            from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

            build_dynamic_sd_schedule_lookup(
                [tuple(row) for row in table], most_requests, config.speculative_config.num_speculative_tokens
            )
    except Exception as error:
        text = " ".join(str(error).split())
        raise ConfigurationError(f"vLLM {vllm.__version__} refuses it: {text:.500}") from error
    return f"vLLM {vllm.__version__} takes it"
