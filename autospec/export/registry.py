"""The runtimes by the name under which a user knows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autospec.export import to_llama_cpp, to_sglang, to_transformers, to_vllm
from autospec.export.base import Exported, Options
from autospec.export.chosen import Chosen

RUNTIMES: Mapping[str, Callable[[Chosen, Options], Exported]] = {
    "transformers": to_transformers.export,
    "vllm": to_vllm.export,
    "sglang": to_sglang.export,
    "llama.cpp": to_llama_cpp.export,
}
