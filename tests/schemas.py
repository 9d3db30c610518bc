"""JSON schemas, and the libraries that turn one into what `generate` takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal, Protocol

import llguidance
import llguidance.hf
import llguidance.numpy
import xgrammar
from lmformatenforcer import JsonSchemaParser, TokenEnforcer, TokenEnforcerTokenizerData
from torch import Tensor
from transformers import LogitsProcessor
from xgrammar.contrib.hf import LogitsProcessor as XGrammarProcessor

SUITE = Path(__file__).parents[2] / "shared" / "data" / "json_schema_suite.jsonl"  # lies beside some checkouts

Schema = Any  # an object, or true or false
Verdict = Literal["no", "part", "whole"]


@dataclass(frozen=True)
class Group:
    """A schema, with instances that it allows and forbids."""

    schema: Schema
    valid: tuple[Any, ...] = ()
    invalid: tuple[Any, ...] = ()


# --- the schemas ------------------------------------------------------------------------------------------------------

LEAVES: dict[str, Schema] = {
    "colour": {"enum": ["red", "green", "blue"]},
    "title": {"type": "string", "maxLength": 8},
    "note": {"type": "string"},
    "count": {"type": "integer"},
    "price": {"type": "number"},
    "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "open": {"type": "boolean"},
    "nothing": {"type": "null"},
    "kind": {"const": "order"},
    "level": {"enum": [1, 20, 300]},
    "maybe": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    "counts": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
    "shade": {"$ref": "#/$defs/shade"},
}
DEFS = {"shade": {"type": "string", "enum": ["light", "dark"]}}


def record(names: list[str], required: list[str]) -> Schema:
    """An object of named leaves and nothing else."""
    return {
        "type": "object",
        "properties": {name: LEAVES[name] for name in names},
        "required": required,
        "additionalProperties": False,
    }


def both_required(a: str, b: str) -> Schema:
    return record([a, b], required=[a, b])


def one_optional(a: str, b: str) -> Schema:
    return record([a, b], required=[a])


def both_optional(a: str, b: str) -> Schema:
    return record([a, b], required=[])


def nested(a: str, b: str) -> Schema:
    outer = record([a], required=[a])
    outer["properties"]["inner"] = record([b], required=[b])
    outer["required"] = [a, "inner"]
    return outer


def listed(a: str, b: str) -> Schema:
    return {"type": "array", "items": record([a, b], required=[a, b]), "minItems": 1, "maxItems": 2}


def alternatives(a: str, b: str) -> Schema:
    return {"anyOf": [record([a], required=[a]), record([b], required=[b])]}


SHAPES = (both_required, one_optional, both_optional, nested, listed, alternatives)


def own_schemas(number: int) -> list[Schema]:
    """`number` different ones: pairs of leaves, each pair in the next shape."""
    names = list(LEAVES)
    pairs = [(a, names[(i + step) % len(names)]) for step in range(1, len(names)) for i, a in enumerate(names)]
    shaped = (SHAPES[(i + lap) % len(SHAPES)](*pair) for lap in count() for i, pair in enumerate(pairs))
    return [{**schema, "$defs": DEFS} for schema in islice(shaped, number)]


def suits_format_enforcer(schema: Schema) -> bool:
    """It lets an integer have an exponent, and a comma stand before an optional property that then does not follow."""
    objects = [part for part in _parts(schema) if "properties" in part]
    return "integer" not in json.dumps(schema) and all(set(o["required"]) == set(o["properties"]) for o in objects)


def _parts(schema: Schema) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _parts(inner)


def suite() -> list[Group]:
    """The groups of the JSON Schema test suite, where its file is at hand."""
    if not SUITE.is_file():
        return []
    rows = [json.loads(line) for line in SUITE.read_text(encoding="utf-8").splitlines()]
    return [
        Group(
            row["schema"],
            valid=tuple(test["data"] for test in row["tests"] if test["valid"]),
            invalid=tuple(test["data"] for test in row["tests"] if not test["valid"]),
        )
        for row in rows
        if r"\\p{" not in json.dumps(row["schema"])  # Python's own patterns have no such classes to validate with
    ]


# --- the libraries ----------------------------------------------------------------------------------------------------


class UnsupportedSchemaError(Exception):
    """The library says that it cannot compile this schema."""


class Grammar(Protocol):
    """A schema compiled by a library."""

    def options(self) -> dict[str, Any]:
        """Keywords that make one `generate` call follow the grammar; anew for each call."""

    def reads(self, tokens: list[int]) -> Verdict:
        """Whether the grammar allows these tokens, and if so whether the text may end after them."""


class Library(Protocol):
    """Compiles schemas for one tokenizer."""

    def compile(self, schema: Schema) -> Grammar:
        """Raises: UnsupportedSchemaError."""


class XGrammar:
    """Its own processor for transformers, which holds a matcher and accepts each new token once."""

    def __init__(self, info: xgrammar.TokenizerInfo) -> None:
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)

    @classmethod
    def of(cls, tokenizer: Any) -> XGrammar:
        return cls(xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer)))

    def compile(self, schema: Schema) -> XGrammarGrammar:
        try:
            compiled = self._compiler.compile_json_schema(
                json.dumps(schema), any_whitespace=False, separators=(",", ":")
            )
        except RuntimeError as error:
            raise UnsupportedSchemaError(str(error)) from error
        return XGrammarGrammar(compiled)


class XGrammarGrammar:
    def __init__(self, compiled: xgrammar.CompiledGrammar) -> None:
        self._compiled = compiled

    def options(self) -> dict[str, Any]:
        return {"logits_processor": [XGrammarProcessor(self._compiled)]}

    def reads(self, tokens: list[int]) -> Verdict:
        matcher = xgrammar.GrammarMatcher(self._compiled)
        if not all(matcher.accept_token(token) for token in tokens):
            return "no"
        return "whole" if matcher.is_completed() else "part"


class LLGuidance:
    """Its matcher in the processor below: the library brings matcher and mask, not the class."""

    def __init__(self, tokenizer: llguidance.LLTokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def of(cls, tokenizer: Any) -> LLGuidance:
        return cls(llguidance.hf.from_tokenizer(tokenizer, n_vocab=len(tokenizer)))

    def compile(self, schema: Schema) -> LLGuidanceGrammar:
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(
                json.dumps(schema), overrides={"whitespace_flexible": False}
            )
        except ValueError as error:  # true and false are schemas, but no objects
            raise UnsupportedSchemaError(str(error)) from error
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise UnsupportedSchemaError(matcher.get_error())
        return LLGuidanceGrammar(matcher, self._tokenizer.vocab_size)


class LLGuidanceGrammar:
    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def options(self) -> dict[str, Any]:
        return {"logits_processor": [LLGuidanceProcessor(self._matcher.deep_copy(), self._vocab_size)]}

    def reads(self, tokens: list[int]) -> Verdict:
        matcher = self._matcher.deep_copy()
        if matcher.try_consume_tokens(tokens) < len(tokens):
            return "no"
        return "whole" if matcher.is_accepting() else "part"


class LLGuidanceProcessor(LogitsProcessor):
    """Gives the matcher each new token once, and masks what it does not allow next."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._bitmask = llguidance.numpy.allocate_token_bitmask(1, vocab_size)
        self._is_started = False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._is_started and not self._matcher.consume_token(int(input_ids[0, -1])):
            raise ValueError(f"the grammar does not allow token {int(input_ids[0, -1])}")
        self._is_started = True
        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._bitmask)
        llguidance.numpy.apply_token_bitmask_inplace(scores.numpy(), self._bitmask)
        return scores


class FormatEnforcer:
    """Its enforcer as the function that `prefix_allowed_tokens_fn` takes, from the whole prefix to the next tokens."""

    def __init__(self, data: TokenEnforcerTokenizerData) -> None:
        self._data = data

    @classmethod
    def of(cls, tokenizer: Any) -> FormatEnforcer:
        return cls(enforcer_data(token_texts(tokenizer), tokenizer.eos_token_id))

    def compile(self, schema: Schema) -> FormatEnforcerGrammar:
        return FormatEnforcerGrammar(self._data, schema)


class FormatEnforcerGrammar:
    def __init__(self, data: TokenEnforcerTokenizerData, schema: Schema) -> None:
        self._data = data
        self._schema = schema

    def options(self) -> dict[str, Any]:
        enforcer = self._enforcer()

        def allowed_tokens(batch: int, input_ids: Tensor) -> list[int]:
            return enforcer.get_allowed_tokens(input_ids.tolist()).allowed_tokens  # type: ignore[no-any-return]

        return {"prefix_allowed_tokens_fn": allowed_tokens}

    def reads(self, tokens: list[int]) -> Verdict:
        enforcer = self._enforcer()
        for end, token in enumerate(tokens):
            if token not in enforcer.get_allowed_tokens(tokens[:end]).allowed_tokens:
                return "no"
        return "whole" if self._data.eos_token_id in enforcer.get_allowed_tokens(tokens).allowed_tokens else "part"

    def _enforcer(self) -> TokenEnforcer:
        return TokenEnforcer(self._data, JsonSchemaParser(self._schema))


LIBRARIES: dict[str, type[XGrammar] | type[LLGuidance] | type[FormatEnforcer]] = {
    "xgrammar": XGrammar,
    "llguidance": LLGuidance,
    "lm-format-enforcer": FormatEnforcer,
}


def token_texts(tokenizer: Any) -> list[str]:
    """[vocab_size], each token's text; empty for special tokens."""
    texts: list[str] = tokenizer.backend_tokenizer.decode_batch([[token] for token in range(len(tokenizer))])
    return texts


def enforcer_data(texts: list[str], eos_token_id: int) -> TokenEnforcerTokenizerData:
    """The tokens of printable ASCII: their texts do not depend on their neighbours."""
    plain = [(i, text, True) for i, text in enumerate(texts) if text and text.isascii() and text.isprintable()]

    def decode(tokens: list[int]) -> str:
        return "".join(texts[token] for token in tokens)

    return TokenEnforcerTokenizerData(plain, decode, eos_token_id, use_bitmask=False, vocab_size=len(texts))
