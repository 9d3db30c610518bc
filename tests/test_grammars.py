"""JSON held to a schema by real grammar libraries: the same under speculation as under plain decoding."""

from __future__ import annotations

import copy
import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import llguidance
import pytest
import schemas
import tiny
import torch
import xgrammar
from jsonschema import Draft202012Validator
from torch import Tensor
from transformers import AutoTokenizer, LogitsProcessor, LogitsProcessorList, PrefixConstrainedLogitsProcessor

import autospec
from autospec import models
from autospec.certify import BOUND, Case, certify
from autospec.certify.cases import SAMPLING
from autospec.certify.certifier import target_distribution, total_variation
from autospec.certify.synthetic import SyntheticModel, Table, random_table
from autospec.drafts import Assistant, NGram, Proposal
from autospec.policies import Fixed
from autospec.types import BlockContext, BlockOutcome

MAX_NEW_TOKENS = 40
CLOSING = set('"]},:')
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 50}
MODES: dict[str, dict[str, Any]] = {"greedy": {"do_sample": False}, "sampled": SAMPLED}

Sentence = tuple[int, ...]


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(models.resolve("smollm2-135m"))


def steering(text: str) -> float:
    """Towards tokens that close strings, lists and objects, away from blanks: otherwise few answers would end."""
    if text and CLOSING.issuperset(text):
        return 4.5 if text[0] == '"' else 3.0
    return -6.0 if text.isspace() else 0.0


@cache
def target() -> Any:
    """Random weights, steered."""
    shape = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = tiny.llama(vocab_size=len(tokenizer()), intermediate_size=16, **shape)
    head = torch.nn.Linear(model.config.hidden_size, len(tokenizer()), dtype=torch.float64)
    texts = schemas.token_texts(tokenizer())
    bias = [steering(text) for text in texts]
    bias[tokenizer().eos_token_id] = 8.0
    with torch.no_grad():
        head.weight.copy_(model.lm_head.weight)
        head.bias.copy_(torch.tensor(bias))
    model.set_output_embeddings(head)
    return model


@cache
def wrapped() -> Any:
    """The target's double, for the speculative side."""
    return copy.deepcopy(target())


@cache
def draft() -> Any:
    return tiny.near_copy(target(), noise=0.05)


@cache
def library(name: str) -> schemas.Library:
    return schemas.LIBRARIES[name].of(tokenizer())


def prompt(number: int) -> Tensor:
    """[1, 14], another for each number, of ordinary tokens."""
    return tiny.prompt(14, seed=number) + tiny.VOCAB


def answer(model: Any, ids: Tensor, seed: int = 0, **options: Any) -> list[int]:
    eos = tokenizer().eos_token_id
    settings = {"max_new_tokens": MAX_NEW_TOKENS, "eos_token_id": eos, "pad_token_id": eos, **options}
    torch.manual_seed(seed)
    tokens: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, ids.shape[1] :].tolist()
    return tokens


def outcome(*args: Any, **options: Any) -> list[int] | str:
    """The answer, or what was raised instead."""
    try:
        return answer(*args, **options)
    except (AssertionError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


class Oracle:
    """Drafts the answer it was told, with every n-th position spoilt."""

    name = "oracle"

    def __init__(self, answer: Sequence[int], spoil_every: int) -> None:
        self.answer = list(answer)  # prompt included
        self._spoil_every = spoil_every

    def attach(self, target: Any, tokenizer: Any) -> None:
        pass

    def start(self, request: Any) -> Oracle:
        return self

    def propose(self, committed: Sequence[int], block_length: int) -> Proposal:
        start, every = len(committed), self._spoil_every
        tokens = self.answer[start : start + block_length]
        return Proposal([t ^ 1 if every and (start + i) % every == 0 else t for i, t in enumerate(tokens)])


class InTurn:
    """Another action at every block; keeps what came of each."""

    name = "in turn"

    def __init__(self, *actions: tuple[str, int]) -> None:
        self._actions = [autospec.Action(source, block_length) for source, block_length in actions]
        self.outcomes: list[BlockOutcome] = []

    def choose(self, context: BlockContext) -> autospec.Action:
        return self._actions[len(self.outcomes) % len(self._actions)]

    def observe(self, outcome: BlockOutcome) -> None:
        self.outcomes.append(outcome)

    def counts(self, source: str) -> tuple[int, int]:
        """Accepted and rejected draft tokens of a source."""
        own = [outcome for outcome in self.outcomes if outcome.action.source == source]
        accepted = sum(outcome.num_accepted_tokens for outcome in own)
        return accepted, sum(outcome.num_judged_tokens for outcome in own) - accepted


# --- over two hundred schemas -----------------------------------------------------------------------------------------


def encode(instance: Any) -> list[int]:
    text = json.dumps(instance, ensure_ascii=False, separators=(",", ":"))
    tokens: list[int] = tokenizer().encode(text, add_special_tokens=False)
    return tokens


def understands(grammar: schemas.Grammar, group: schemas.Group) -> bool:
    """Whether the grammar allows instances of the group's schema and none of those it forbids."""
    return (
        bool(group.invalid)
        and any(grammar.reads(encode(instance)) == "whole" for instance in group.valid)
        and all(grammar.reads(encode(instance)) != "whole" for instance in group.invalid)
    )


@cache
def of_the_suite(name: str) -> list[tuple[schemas.Schema, schemas.Grammar]]:
    found = []
    for group in schemas.suite():
        try:
            grammar = library(name).compile(group.schema)
        except schemas.UnsupportedSchemaError:
            continue
        if understands(grammar, group):
            found.append((group.schema, grammar))
    return found


OWN = 40  # own schemas for each library, others for each; more where the suite is not at hand
OWN_ALONE = 105
FORMAT_ENFORCER = 24


@cache
def grammars(name: str) -> list[tuple[schemas.Schema, schemas.Grammar]]:
    """Own schemas, and what the library understands of the suite."""
    number = OWN if schemas.suite() else OWN_ALONE
    own = schemas.own_schemas(2 * number)
    if name == "lm-format-enforcer":
        suited = [schema for schema in own if schemas.suits_format_enforcer(schema)]
        suited.sort(key=lambda schema: "note" not in json.dumps(schema))  # free text first: there drafts have a chance
        return [(schema, library(name).compile(schema)) for schema in suited[:FORMAT_ENFORCER]]
    share = own[:number] if name == "xgrammar" else own[number:]
    return [*((schema, library(name).compile(schema)) for schema in share), *of_the_suite(name)]


def is_finished(schema: schemas.Schema, grammar: schemas.Grammar, tokens: list[int]) -> bool:
    """Whether the answer ended by itself; it is then valid JSON of the schema, otherwise the beginning of some."""
    if tokens[-1] != tokenizer().eos_token_id:
        assert len(tokens) == MAX_NEW_TOKENS
        assert grammar.reads(tokens) != "no"
        return False
    Draft202012Validator(schema).validate(json.loads(tokenizer().decode(tokens[:-1])))
    return True


@pytest.mark.model
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", schemas.LIBRARIES)
def test_json_of_many_schemas_is_that_of_generate(name: str, mode: str) -> None:
    oracle, policy = Oracle([], spoil_every=5), InTurn(("oracle", 6), ("assistant", 2), ("ngram", 3))
    pairs = grammars(name)
    finished, found = 0, []
    with autospec.wrap(wrapped(), drafts=[oracle, Assistant(draft()), NGram(min_ngram=1)], policy=policy) as speculator:
        for seed, (schema, grammar) in enumerate(pairs):
            ids = torch.cat(
                [prompt(seed), torch.tensor([found], dtype=torch.long)], dim=-1
            )  # the last answer: an example
            plain = answer(target(), ids, seed, **MODES[mode], **grammar.options())
            oracle.answer = [*ids[0].tolist(), *plain]
            found = answer(wrapped(), ids, seed, **MODES[mode], **grammar.options())
            record = speculator.last_request
            assert record is not None
            assert record.fallback_reason is None
            assert record.notes is None
            assert found == plain, schema
            finished += is_finished(schema, grammar, found)
    assert finished >= 0.9 * len(pairs)
    for source in ("oracle", "assistant", "ngram"):
        accepted, rejected = policy.counts(source)
        assert accepted > len(pairs) / 25, source
        assert rejected > len(pairs) / 10, source


@pytest.mark.model
def test_there_are_over_two_hundred_schemas() -> None:
    every = {name: {json.dumps(schema) for schema, _ in grammars(name)} for name in schemas.LIBRARIES}
    assert len(set.union(*every.values())) > 200
    for name in ("xgrammar", "llguidance"):
        assert len(every[name]) == len(grammars(name)) >= OWN_ALONE
    assert len(every["lm-format-enforcer"]) == FORMAT_ENFORCER


# --- how the libraries are driven -------------------------------------------------------------------------------------

ORDER: schemas.Schema = {
    "type": "object",
    "properties": {"title": {"type": "string"}, "counts": {"type": "array", "items": {"type": "integer"}}},
    "required": ["title", "counts"],
    "additionalProperties": False,
}
ANSWERED: schemas.Schema = {
    "type": "object",
    "properties": {"yes": {"type": "boolean"}},
    "required": ["yes"],
    "additionalProperties": False,
}


def speculative(
    ids: Tensor, plain: list[int], run: Callable[[Any], Any], block_length: int = 8, spoil_every: int = 0
) -> tuple[Any, InTurn]:
    """What `run` makes of the wrapped double of the target when the plain answer is drafted."""
    oracle, policy = Oracle([*ids[0].tolist(), *plain], spoil_every), InTurn(("oracle", block_length))
    with autospec.wrap(wrapped(), drafts=[oracle], policy=policy):
        result = run(wrapped())
    return result, policy


class Watched(LogitsProcessor):
    """Passes calls on and keeps the prefixes it saw."""

    def __init__(self, inner: LogitsProcessor) -> None:
        self._inner = inner
        self.prefixes: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.prefixes.append(input_ids[0].tolist())
        return self._inner(input_ids, scores)


def watched(options: dict[str, Any]) -> tuple[dict[str, Any], list[list[int]]]:
    """The same options, and a list that each prefix shown to the library goes into."""
    if "logits_processor" in options:
        processor = Watched(options["logits_processor"][0])
        return {"logits_processor": [processor]}, processor.prefixes
    function, prefixes = options["prefix_allowed_tokens_fn"], []

    def watching(batch: int, input_ids: Tensor) -> Any:
        prefixes.append(input_ids.tolist())
        return function(batch, input_ids)

    return {"prefix_allowed_tokens_fn": watching}, prefixes


@pytest.mark.model
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", schemas.LIBRARIES)
def test_a_library_is_asked_once_for_each_committed_token_with_its_own_prefix(name: str, mode: str) -> None:
    ids, grammar = prompt(3), library(name).compile(ORDER)
    plain = answer(target(), ids, **MODES[mode], **grammar.options())
    options, prefixes = watched(grammar.options())
    found, policy = speculative(ids, plain, lambda model: answer(model, ids, **MODES[mode], **options), 6, 4)
    assert found == plain
    assert prefixes == [[*ids[0].tolist(), *plain[:end]] for end in range(len(plain))]
    assert all(policy.counts("oracle"))


@pytest.mark.model
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", schemas.LIBRARIES)
def test_a_matcher_that_has_ended_and_is_asked_again(name: str, mode: str) -> None:
    """The library ends at a token that does not end the call."""
    ids, grammar = prompt(4), library(name).compile(ANSWERED)
    settings = {**MODES[mode], "eos_token_id": None, "max_new_tokens": 24}
    plain = outcome(target(), ids, **settings, **grammar.options())
    found, policy = speculative(ids, plain, lambda model: outcome(model, ids, **settings, **grammar.options()))
    assert found == plain
    assert isinstance(plain, list)
    end = plain.index(tokenizer().eos_token_id)
    after = [o for o in policy.outcomes if o.context_tokens > ids.shape[1] + end]
    assert sum(o.num_accepted_tokens for o in after) > 0


@pytest.mark.model
@pytest.mark.parametrize("last", ["an ordinary token", "the end of a text"])
@pytest.mark.parametrize("name", schemas.LIBRARIES)
def test_a_second_call_with_the_same_processor_and_with_a_fresh_one(name: str, last: str) -> None:
    ids, grammar = prompt(5), library(name).compile(ANSWERED)
    if last == "the end of a text":
        ids[0, -1] = tokenizer().eos_token_id

    def two_calls(model: Any, *options: dict[str, Any]) -> list[list[int] | str]:
        return [outcome(model, ids, do_sample=False, **each) for each in options]

    def reused(model: Any) -> list[list[int] | str]:
        return two_calls(model, *[grammar.options()] * 2)

    def fresh(model: Any) -> list[list[int] | str]:
        return two_calls(model, grammar.options(), grammar.options())

    first, second = reused(target())
    found, policy = speculative(ids, first, reused)
    assert found == [first, second]
    assert policy.counts("oracle")[0] > 0
    assert speculative(ids, first, fresh)[0] == fresh(target()) == [first, first]
    if name != "lm-format-enforcer":  # its function keeps no place in a text
        assert first != second


IN_FREE_TEXT = {"min_new_tokens": 8, "repetition_penalty": 1.5}


def with_a_late_token(mode: str) -> tuple[Tensor, int, list[int], int]:
    """A prompt, a seed, their free answer, and a position from the fourth on of a token that is new there."""
    for number in range(100):
        ids = prompt(number)
        free = answer(target(), ids, number, **MODES[mode], **IN_FREE_TEXT)
        for where in range(3, len(free) - 1):
            if free[where] not in [*ids[0].tolist(), *free[:where]]:
                return ids, number, free, where
    raise LookupError("every answer repeats its first three tokens")


class AfterMarker(LogitsProcessor):
    """Leaves the text free up to a marker, and holds what follows to a grammar."""

    def __init__(self, marker: int, inner: LogitsProcessor) -> None:
        self._marker = marker
        self._inner = inner

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self._inner(input_ids, scores) if self._marker in input_ids[0].tolist() else scores


@pytest.mark.model
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["xgrammar", "llguidance"])
def test_a_grammar_that_starts_at_a_marker_inside_an_accepted_block(name: str, mode: str) -> None:
    grammar = library(name).compile(ORDER)
    ids, seed, free, where = with_a_late_token(mode)

    def run(model: Any) -> list[int]:
        processor = AfterMarker(free[where], grammar.options()["logits_processor"][0])
        return answer(model, ids, seed, **MODES[mode], **IN_FREE_TEXT, max_new_tokens=60, logits_processor=[processor])

    plain = run(target())
    for block_length in (2, 5, 8, 16):
        found, policy = speculative(ids, plain, run, block_length)
        assert found == plain
    first = policy.outcomes[0]
    start = first.context_tokens - ids.shape[1]
    assert start < where < start + first.num_accepted_tokens
    assert plain[: where + 1] == free[: where + 1]
    assert plain != free
    assert grammar.reads([t for t in plain[where + 1 :] if t != tokenizer().eos_token_id]) == "whole"


@pytest.mark.model
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", schemas.LIBRARIES)
def test_a_dead_end(name: str, mode: str) -> None:
    """Neither `true` nor `false` can be begun, so every token has the score minus infinity."""
    ids, grammar = prompt(7), library(name).compile(ANSWERED)
    texts = schemas.token_texts(tokenizer())
    dead = [token for token, text in enumerate(texts) if "t" in text or "f" in text or not text.strip()]

    def run(model: Any) -> tuple[list[int] | str, list[list[int]]]:
        options, prefixes = watched(grammar.options())
        return outcome(model, ids, **MODES[mode], suppress_tokens=dead, **options), prefixes

    plain, prefixes = run(target())
    before = prefixes[-1][ids.shape[1] :]
    assert isinstance(plain, str) or name == "lm-format-enforcer"
    assert ":" in tokenizer().decode(before)
    found, policy = speculative(ids, before, run, block_length=len(before))
    assert found == (plain, prefixes)
    assert len(before) >= 3
    assert not policy.outcomes or policy.counts("oracle")[0] > 0
    again = answer(target(), ids, **MODES[mode], **grammar.options())
    assert speculative(ids, again, lambda model: answer(model, ids, **MODES[mode], **grammar.options()))[0] == again


# --- certified on five tokens -----------------------------------------------------------------------------------------

TEXTS = ["[", "1", ",1", "]", ""]
EOS = 4
LISTS: schemas.Schema = {"type": "array", "items": {"enum": [1, 11]}, "maxItems": 2}
SENTENCES = ["[" + ",".join(items) + "]" for n in range(3) for items in product(("1", "11"), repeat=n)]
PROMPT = (0, 1, 2, 3)


class FiveTokens:
    """What llguidance asks of a tokenizer."""

    eos_token_id = EOS
    bos_token_id = None
    tokens = [*(text.encode() for text in TEXTS[:EOS]), b"<end>"]  # noqa: RUF012
    special_token_ids = [EOS]  # noqa: RUF012

    def __call__(self, text: str) -> list[int]:
        longest_first = sorted(range(EOS), key=lambda token: -len(TEXTS[token]))
        tokens: list[int] = []
        while text:
            tokens.append(next(token for token in longest_first if text.startswith(TEXTS[token])))
            text = text.removeprefix(TEXTS[tokens[-1]])
        return tokens


def five_tokens(name: str) -> schemas.Library:
    if name == "xgrammar":
        vocabulary = [*TEXTS[:EOS], "<end>"]
        return schemas.XGrammar(xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, stop_token_ids=[EOS]))
    if name == "llguidance":
        return schemas.LLGuidance(llguidance.LLTokenizer(llguidance.TokenizerWrapper(FiveTokens()), eos_token=EOS))
    return schemas.FormatEnforcer(schemas.enforcer_data(TEXTS, EOS))


class InFloat64(LogitsProcessor):
    """Lays the mask of a library whose kernel takes float32 on scores of any kind."""

    def __init__(self, inner: LogitsProcessor) -> None:
        self._inner = inner

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        mask = self._inner(input_ids, torch.zeros(scores.shape, dtype=torch.float32))
        return scores.masked_fill(mask == -torch.inf, -torch.inf)


def in_float64(options: dict[str, Any]) -> LogitsProcessorList:
    if "prefix_allowed_tokens_fn" in options:
        return LogitsProcessorList([PrefixConstrainedLogitsProcessor(options["prefix_allowed_tokens_fn"], 1)])
    return LogitsProcessorList([InFloat64(processor) for processor in options["logits_processor"]])


def allowed(tokens: Sentence) -> list[int]:
    """The tokens that may follow, from the list of sentences alone."""
    text = "".join(TEXTS[token] for token in tokens)
    going_on = [token for token in range(EOS) if any(s.startswith(text + TEXTS[token]) for s in SENTENCES)]
    return [*going_on, *([EOS] if text in SENTENCES else [])]


def masked_and_renormalised(table: Table, max_new_tokens: int) -> dict[Sentence, float]:
    """Probabilities of whole outputs."""
    found: dict[Sentence, float] = defaultdict(float)

    def follow(tokens: Sentence, probability: float) -> None:
        if len(tokens) == max_new_tokens or tokens[-1:] == (EOS,):
            found[tokens] += probability
            return
        probs = table((*PROMPT, *tokens))
        total = sum(probs[token] for token in allowed(tokens))
        for token in allowed(tokens):
            follow((*tokens, token), probability * probs[token] / total)

    follow((), 1.0)
    return found


@pytest.mark.parametrize("source", ["ngram", "assistant"])
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("name", schemas.LIBRARIES)
def test_distribution_is_the_masked_one(name: str, sampling: str, source: str) -> None:
    grammar = five_tokens(name).compile(LISTS)
    table, draft_table = random_table(61, len(TEXTS)), random_table(63, len(TEXTS), zeros=0.5)
    draft_model = SyntheticModel(draft_table, len(TEXTS))
    case = Case(
        f"{name}, {source}, {sampling}",
        SyntheticModel(table, len(TEXTS)),
        lambda: {"assistant": Assistant(draft_model), "ngram": NGram(min_ngram=1)},
        policy=lambda: Fixed(source, block_length=2),
        prompt=PROMPT,
        max_new_tokens=5,
        sampling=sampling,
        processors=lambda: in_float64(grammar.options()),
        eos=(EOS,),
    )
    expected = masked_and_renormalised(table, case.max_new_tokens)
    assert total_variation(expected, target_distribution(case)) <= BOUND
    certificate = next(certify([case]))
    assert certificate.is_exact, certificate
    assert certificate.outputs == len(expected)
    assert certificate.accepted > 0.1


@pytest.mark.model
def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[1] / "docs" / "grammars.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, page.name, "exec"), names)
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"name", "age"}
    record = names["speculator"].last_request
    assert record.fallback_reason is None
    assert record.num_accepted_tokens > 0
