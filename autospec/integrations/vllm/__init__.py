"""The controller inside vLLM: its `custom_class` method of speculative decoding (docs/vllm.md)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autospec.integrations.vllm.proposer import Proposer as Proposer

__all__ = ["Proposer"]


def __getattr__(name: str) -> Any:
    if name != "Proposer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from autospec.integrations.vllm.proposer import Proposer

    return Proposer
