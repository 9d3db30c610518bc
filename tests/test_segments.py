"""Which segment a request is in: the order of what decides, bounds, and wrapped models."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_tokenizers
import torch

import autospec
from autospec.errors import ConfigurationError
from autospec.segments import DEFAULT, OTHER, SEGMENTS, Assignment, Prompt, Rule, Segmenter, clean, make_segmenter
from autospec.segments.clusters import fit_clusters, points_of

GREEDY = {"do_sample": False, "max_new_tokens": 3}
TEXTS = {
    "code": "Write a Python function that sorts a list.",
    "translation": "Translate to German: the dog sleeps.",
    "other": "over the lazy dog",
}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.llama(vocab_size=320)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizers.byte_level(320)


@pytest.fixture(scope="module")
def clusters() -> Any:
    texts = [f"{word} {word} dog {i}" for i in range(10) for word in ("over", "under")]
    return fit_clusters(points_of([Prompt.of_text(text) for text in texts]), 2)


def segment_of(speculator: Any, ids: torch.Tensor, **options: Any) -> str:
    speculator.model.generate(ids, **{**GREEDY, **options})
    assert speculator.last_request is not None
    return str(speculator.last_request.segment)


class TestOrder:
    def test_label_block_rule_signs_clusters(self, clusters: Any) -> None:
        segmenter = Segmenter([Rule("lists", text="list")], builtin=True, clusters=clusters)
        code, translation, other = (Prompt.of_text(text) for text in TEXTS.values())
        with autospec.segment("around"):
            assert segmenter.assign(code, "call").origin == "label"
            assert segmenter.assign(code) == Assignment("around", "block", "inside autospec.segment(...)")
        assert segmenter.assign(code) == Assignment("lists", "rule", "rule 1: text = 'list'")
        assert segmenter.assign(translation).segment == "translation"
        found = segmenter.assign(other)
        assert (found.origin, found.segment) == ("cluster", clusters.nearest(other))
        assert found.why.startswith("nearest of 2 centres, distance ")

    def test_nothing_to_ask(self) -> None:
        assert Segmenter().assign(Prompt.of_text(TEXTS["code"])).origin == "default"
        assert Segmenter(builtin=True).assign(Prompt.of_text(TEXTS["other"])).segment == OTHER

    def test_without_text_no_clusters(self, clusters: Any) -> None:
        assert Segmenter(clusters=clusters).assign(Prompt.of_text("")).segment == DEFAULT
        assert Segmenter(builtin=True, clusters=clusters).assign(Prompt.of_text("")).segment == OTHER

    def test_why_names_the_signs(self) -> None:
        why = Segmenter(builtin=True).assign(Prompt.of_text("Write a Python function. " + "x = f(1);\n" * 9)).why
        assert why.startswith("code ")
        assert "word 'python' (code +1.5)" in why
        assert "lines of code" in why
        assert Segmenter(builtin=True).assign(Prompt.of_text("")).why == "no sign of anything"

    def test_tenants(self) -> None:
        segmenter = Segmenter([Rule("acme", tenant="^acme$")])

        class Asked:
            arguments: dict[str, Any] = {"input_ids": torch.tensor([[1, 2]])}  # noqa: RUF012

            def prompt_ids(self) -> torch.Tensor:
                return torch.tensor([[1, 2]])

            def prompt_tokens(self) -> int:
                return 2

            def setting(self, name: str) -> None:
                return None

            def describe(self) -> str:
                return "greedy"

        def seen() -> str:
            return segmenter.assign(Prompt.of_call(Asked(), None)).segment  # type: ignore[arg-type]

        assert seen() == DEFAULT
        with autospec.tenant("other"):
            assert seen() == DEFAULT
            with autospec.tenant(" acme\n"):
                assert seen() == "acme"
            assert seen() == DEFAULT
        for bad in (5, "", "\n"):
            with pytest.raises(ConfigurationError, match="tenant="), autospec.tenant(bad):  # type: ignore[arg-type]
                pass


class TestBounds:
    HOSTILE = (
        "\x1b[31mred",
        "a\x00b",
        "x" * 10_000,
        "\u202etxet",
        "<script>",
        "'; drop table x; --",
        "\ud800",
        "\u200b",
    )

    @pytest.mark.parametrize("label", HOSTILE, ids=range(len(HOSTILE)))
    def test_labels_are_cleaned(self, label: str) -> None:
        found = Segmenter().assign(Prompt.of_text("a"), label).segment
        assert found == clean(label)
        assert len(found) <= 80
        assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in found)

    def test_a_cut_leaves_no_space_behind(self) -> None:
        assert clean("a" * 79 + " b") == "a" * 79

    def test_labels_beyond_the_bound_are_other(self) -> None:
        segmenter = Segmenter([Rule("rule", text="zzz")], builtin=True, max_segments=3)
        prompt = Prompt.of_text("a")
        found = [segmenter.assign(prompt, f"user-{i}").segment for i in range(6)]
        assert found == ["user-0", "user-1", "user-2", OTHER, OTHER, OTHER]
        assert segmenter.assign(prompt, "user-1").segment == "user-1"
        assert [segmenter.assign(prompt, own).segment for own in ("rule", *SEGMENTS)] == ["rule", *SEGMENTS]
        assert "3 labels already" in segmenter.assign(prompt, "user-9").why
        with autospec.segment("user-9"):
            assert segmenter.assign(prompt).segment == OTHER

    def test_threads_do_not_pass_the_bound(self) -> None:
        segmenter = Segmenter(max_segments=10)
        prompt = Prompt.of_text("a")
        barrier = threading.Barrier(8)

        def ask(thread: int) -> set[str]:
            barrier.wait()
            return {segmenter.assign(prompt, f"{i % 50}-{thread % 2}").segment for i in range(500)}

        with ThreadPoolExecutor(8) as pool:
            found = set().union(*pool.map(ask, range(8)))
        assert len(found - {OTHER}) == 10

    @pytest.mark.parametrize("options", [{"max_segments": 0}, {"max_segments": True}, {"rules": ["a"]}])
    def test_bad_arguments(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError):
            Segmenter(**options)


class TestWrap:
    def test_none_is_as_before(self, model: Any, tokenizer: Any) -> None:
        ids = tokenizer(TEXTS["code"], return_tensors="pt")["input_ids"]
        with autospec.wrap(model, tokenizer=tokenizer, policy="off") as speculator:
            assert segment_of(speculator, ids) == DEFAULT
            assert segment_of(speculator, ids, segment="mine") == "mine"

    def test_labels_are_bounded_without_a_segmenter_too(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("autospec.segments.segmenter.MAX_SEGMENTS", 2)
        with autospec.wrap(model, policy="off", segments=Segmenter(max_segments=2)) as speculator:
            ids = tiny.prompt(5)
            assert [segment_of(speculator, ids, segment=f"{i}") for i in range(4)] == ["0", "1", OTHER, OTHER]

    def test_auto(self, model: Any, tokenizer: Any) -> None:
        with autospec.wrap(model, tokenizer=tokenizer, policy="off", segments="auto") as speculator:
            for segment, text in TEXTS.items():
                ids = tokenizer(text, return_tensors="pt")["input_ids"]
                assert segment_of(speculator, ids) == segment
                assert segment_of(speculator, ids, segment="call") == "call"
                with autospec.segment("block"):
                    assert segment_of(speculator, ids) == "block"
                with speculator.control():
                    assert segment_of(speculator, ids) == segment

    def test_answers_do_not_depend_on_it(self, model: Any, tokenizer: Any) -> None:
        ids = tokenizer(TEXTS["code"], return_tensors="pt")["input_ids"]
        plain = model.generate(ids, do_sample=False, max_new_tokens=20)
        with autospec.wrap(model, tokenizer=tokenizer, policy="fixed:ngram:4", segments="auto"):
            assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=20), plain)

    def test_a_file(self, model: Any, tokenizer: Any, clusters: Any, tmp_path: Path) -> None:
        clusters.save(tmp_path / "c.npz")
        path = tmp_path / "segments.toml"
        path.write_text(
            "[segments]\nbuiltin = true\nclusters = 'c.npz'\n"
            "[[segments.rules]]\nname = 'sampled'\ndo_sample = true\n"
            "[[segments.rules]]\nname = 'acme'\ntenant = 'acme'\n",
            encoding="utf-8",
        )
        for given in (path, str(path)):
            with autospec.wrap(model, tokenizer=tokenizer, policy="off", segments=given) as speculator:
                code, _, other = (tokenizer(text, return_tensors="pt")["input_ids"] for text in TEXTS.values())
                assert segment_of(speculator, code, do_sample=True) == "sampled"
                with autospec.tenant("acme"):
                    assert segment_of(speculator, code) == "acme"
                assert segment_of(speculator, code) == "code"
                assert segment_of(speculator, other).startswith("cluster-")

    def test_without_a_tokenizer_length_and_decoding_are_left(self, model: Any) -> None:
        segmenter = Segmenter([Rule("short", max_prompt_tokens=10), Rule("text", text=".")], builtin=True)
        with autospec.wrap(model, policy="off", segments=segmenter) as speculator:
            assert segment_of(speculator, tiny.prompt(5)) == "short"
            assert segment_of(speculator, tiny.prompt(20)) == OTHER
            allowed = {"prefix_allowed_tokens_fn": lambda batch, ids: [1, 2]}
            assert segment_of(speculator, tiny.prompt(20), **allowed) == "structured_output"

    def test_a_tokenizer_given_with_the_call(self, model: Any, tokenizer: Any) -> None:
        ids = tokenizer(TEXTS["code"], return_tensors="pt")["input_ids"]
        with autospec.wrap(model, policy="off", segments="auto") as speculator:
            assert segment_of(speculator, ids, tokenizer=tokenizer, stop_strings=["zzz"]) == "code"

    def test_embeddings_and_nothing(self, model: Any, tokenizer: Any) -> None:
        embeddings = model.get_input_embeddings()(tiny.prompt(8))
        with autospec.wrap(model, tokenizer=tokenizer, policy="off", segments="auto") as speculator:
            model.generate(inputs_embeds=embeddings, **GREEDY)
            assert speculator.last_request is not None
            assert speculator.last_request.segment == OTHER

    @pytest.mark.parametrize("batch", [1, 3])
    def test_batches_go_by_their_first_row(self, model: Any, tokenizer: Any, batch: int) -> None:
        ids = tokenizer(TEXTS["code"], return_tensors="pt")["input_ids"].repeat(batch, 1)
        with (
            warnings.catch_warnings(),
            autospec.wrap(model, tokenizer=tokenizer, policy="off", segments="auto") as speculator,
        ):
            warnings.simplefilter("ignore")  # batches are left to the original generate
            assert segment_of(speculator, ids) == "code"

    def test_a_segmenter_that_fails_costs_no_answer(self, model: Any, tokenizer: Any) -> None:
        class Failing(Segmenter):
            def look(self, prompt: Prompt) -> Assignment:
                raise RuntimeError("out of ideas")

        ids = tiny.prompt(10)
        plain = model.generate(ids, **GREEDY)
        with autospec.wrap(model, tokenizer=tokenizer, policy="off", segments=Failing()) as speculator:
            with pytest.warns(UserWarning, match="RuntimeError: out of ideas; such requests are in 'default'"):
                assert torch.equal(model.generate(ids, **GREEDY), plain)
            for _ in range(2):  # warned about once
                assert segment_of(speculator, ids) == DEFAULT
            assert segment_of(speculator, ids, segment="mine") == "mine"

    @pytest.mark.parametrize("segment", [None, "", "\n", 5])
    def test_a_segmenter_whose_answer_is_no_label(self, model: Any, segment: Any) -> None:
        class Odd(Segmenter):
            def look(self, prompt: Prompt) -> Assignment:
                return Assignment(segment, "mine", "")

        with (
            autospec.wrap(model, policy="off", segments=Odd()) as speculator,
            pytest.warns(UserWarning, match="such requests are in 'default'"),
        ):
            assert segment_of(speculator, tiny.prompt(10)) == DEFAULT

    def test_a_tokenizer_that_fails(self, model: Any) -> None:
        class Failing:
            def decode(self, ids: list[int]) -> str:
                raise OverflowError("no such id")

        with (
            autospec.wrap(model, tokenizer=Failing(), policy="off", segments="auto") as speculator,
            pytest.warns(UserWarning, match="OverflowError"),
        ):
            assert segment_of(speculator, tiny.prompt(10)) == DEFAULT

    @pytest.mark.parametrize("label", [5, "", b"x"])
    def test_bad_labels_are_errors_still(self, model: Any, tokenizer: Any, label: Any) -> None:
        with (
            autospec.wrap(model, tokenizer=tokenizer, policy="off", segments="auto"),
            pytest.raises(ConfigurationError, match="segment="),
        ):
            model.generate(tiny.prompt(10), segment=label, **GREEDY)

    def test_threads(self, model: Any, tokenizer: Any) -> None:
        ids = {segment: tokenizer(text, return_tensors="pt")["input_ids"] for segment, text in TEXTS.items()}
        seen: list[tuple[str, str]] = []

        class Watching(Segmenter):
            def look(self, prompt: Prompt) -> Assignment:
                found = super().look(prompt)
                seen.append((prompt.text, found.segment))
                return found

        with (
            autospec.wrap(model, tokenizer=tokenizer, policy="off", segments=Watching(builtin=True)),
            ThreadPoolExecutor(4) as pool,
        ):
            list(pool.map(lambda name: model.generate(ids[name], **GREEDY), [*TEXTS] * 8))
        assert sorted(seen) == sorted((text, segment) for segment, text in TEXTS.items() for _ in range(8))


class TestMaking:
    def test_what_wrap_takes(self, tmp_path: Path) -> None:
        segmenter = Segmenter()
        assert make_segmenter(segmenter) is segmenter
        assert make_segmenter("auto").builtin
        assert not make_segmenter(None).builtin

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (5, "segments=5: None, 'auto', the path of a TOML file"),
            (["a"], "segments="),
            ("automatic", "automatic: cannot read the rules"),
        ],
    )
    def test_what_it_does_not(self, model: Any, given: Any, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            autospec.wrap(model, policy="off", segments=given)
        assert "generate" not in vars(model)
