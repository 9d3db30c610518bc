"""The runtimes' settings as their documentation has them: JSON Schema, by the runtime's name.

Flags stand as an object from flag to value. Where each was read:

- transformers 5.24, `GenerationConfig`: section "Generation parameters exclusive to assistant generation", `use_mtp`.
- vLLM, docs/features/speculative_decoding: README.md, section "`--speculative-config` schema" (added by pull request
  40455), and dynamic_speculative_decoding.md of 0.24. Ranges are those of `vllm.config.SpeculativeConfig`.
- SGLang, docs_new/docs/advanced_features/speculative_decoding.mdx, section "Full Parameter Reference" (2026, with
  DFLASH and DSPARK). A trie of depth 1 is refused at the start.
- llama.cpp, docs/speculative.md, section "Command-Line Options", after pull request 22397, which renamed them; ranges
  of n-grams are those of common/arg.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_AT_LEAST_1: dict[str, Any] = {"type": "integer", "minimum": 1}
_AT_LEAST_0: dict[str, Any] = {"type": "integer", "minimum": 0}
_SHARE: dict[str, Any] = {"type": "number", "minimum": 0, "maximum": 1}
_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_NGRAM: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": 1024}


def _object(properties: dict[str, Any], *rules: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False, "allOf": list(rules)}


def _needs(key: str, values: list[str], *required: str) -> dict[str, Any]:
    """With one of these values, other keys are needed."""
    return {"if": {"required": [key], "properties": {key: {"enum": values}}}, "then": {"required": list(required)}}


_SPEC_TYPE = (
    "(draft-simple|draft-eagle3|draft-dflash|draft-dspark|draft-mtp|"
    "ngram-cache|ngram-simple|ngram-map-k|ngram-map-k4v|ngram-mod)"
)

SCHEMAS: Mapping[str, dict[str, Any]] = {
    "transformers": _object(
        {
            "num_assistant_tokens": _AT_LEAST_1,
            "num_assistant_tokens_schedule": {"enum": ["heuristic", "heuristic_transient", "constant"]},
            "assistant_confidence_threshold": _SHARE,
            "prompt_lookup_num_tokens": _AT_LEAST_1,
            "max_matching_ngram_size": _AT_LEAST_1,
            "assistant_early_exit": _AT_LEAST_1,
            "assistant_lookbehind": _AT_LEAST_1,
            "target_lookbehind": _AT_LEAST_1,
            "assistant_ensemble_weight": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
            "speculation_type": {"enum": ["dflash"]},
            "use_mtp": {"type": "boolean"},
        }
    ),
    "vllm": _object(
        {
            "method": {"enum": ["draft_model", "ngram", "ngram_gpu", "suffix", "mtp", "eagle", "eagle3", "dflash"]},
            "model": _TEXT,
            "num_speculative_tokens": _AT_LEAST_1,
            "draft_tensor_parallel_size": _AT_LEAST_1,
            "max_model_len": _AT_LEAST_1,
            "parallel_drafting": {"type": "boolean"},
            "prompt_lookup_max": _AT_LEAST_1,
            "prompt_lookup_min": _AT_LEAST_1,
            "suffix_decoding_max_tree_depth": _AT_LEAST_1,
            "suffix_decoding_max_cached_requests": _AT_LEAST_0,
            "suffix_decoding_max_spec_factor": {"type": "number", "minimum": 0},
            "suffix_decoding_min_token_prob": _SHARE,
            "num_speculative_tokens_per_batch_size": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "array",
                    "prefixItems": [_AT_LEAST_1, _AT_LEAST_1, _AT_LEAST_0],
                    "minItems": 3,
                    "items": False,
                },
            },
        },
        _needs("method", ["ngram", "ngram_gpu", "mtp"], "num_speculative_tokens"),
        _needs("method", ["draft_model", "eagle", "eagle3", "dflash"], "model", "num_speculative_tokens"),
    ),
    "sglang": _object(
        {
            "--speculative-algorithm": {
                "enum": ["DFLASH", "DSPARK", "EAGLE", "EAGLE3", "STANDALONE", "NGRAM", "NEXTN"],
            },
            "--speculative-draft-model-path": _TEXT,
            "--speculative-draft-model-revision": _TEXT,
            "--speculative-num-steps": _AT_LEAST_1,
            "--speculative-eagle-topk": _AT_LEAST_1,
            "--speculative-num-draft-tokens": _AT_LEAST_1,
            "--speculative-ngram-min-bfs-breadth": _AT_LEAST_1,
            "--speculative-ngram-max-bfs-breadth": _AT_LEAST_1,
            "--speculative-ngram-match-type": {"enum": ["BFS", "PROB"]},
            "--speculative-ngram-max-trie-depth": {"type": "integer", "minimum": 2},
            "--speculative-ngram-capacity": _AT_LEAST_1,
        },
        _needs("--speculative-algorithm", ["STANDALONE", "EAGLE3", "DFLASH"], "--speculative-draft-model-path"),
        {  # all three, or none, for the algorithms that draft step by step
            "dependentRequired": {
                "--speculative-num-steps": ["--speculative-eagle-topk", "--speculative-num-draft-tokens"],
                "--speculative-eagle-topk": ["--speculative-num-steps", "--speculative-num-draft-tokens"],
            }
        },
    ),
    "llama.cpp": _object(
        {
            "--spec-type": {"type": "string", "pattern": f"^(none|{_SPEC_TYPE}(,{_SPEC_TYPE})*)$"},
            "--spec-draft-model": _TEXT,
            "--spec-draft-hf": _TEXT,
            "--spec-draft-n-max": _AT_LEAST_0,
            "--spec-draft-n-min": _AT_LEAST_0,
            "--spec-draft-p-min": _SHARE,
            "--spec-draft-p-split": _SHARE,
            "--spec-ngram-simple-size-n": _NGRAM,
            "--spec-ngram-simple-size-m": _NGRAM,
            "--spec-ngram-simple-min-hits": _AT_LEAST_1,
        },
        _needs("--spec-type", ["draft-simple", "draft-eagle3", "draft-dflash"], "--spec-draft-model"),
    ),
}
