"""`autospec export`: what runtimes take from a tuned policy is as they document it, what they do not take is said."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_heads
import tomli_w
import torch
from click.testing import CliRunner
from jsonschema import Draft202012Validator
from transformers import GenerationConfig

from autospec.cli.export import RUNTIMES, command
from autospec.cli.main import group
from autospec.drafts.registry import BY_NAME, NEEDS_OBJECT
from autospec.export import registry
from autospec.export.schemas import SCHEMAS

DOCS = Path(__file__).parent.parent / "docs" / "export.md"
OFF = {"source": "none", "block_length": 0}
FLAGS = ("sglang", "llama.cpp")


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.llama(num_hidden_layers=3)


def fixed(source: str = "ngram", block_length: int = 4, **more: Any) -> dict[str, Any]:
    return {"source": source, "block_length": block_length, **more}


def run(*args: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(group, ["export", *map(str, args)], prog_name="autospec", auto_envvar_prefix="AUTOSPEC")
    return done.exit_code, done.stdout, done.stderr


def written(folder: Path, default: Any, **fields: Any) -> Path:
    file = folder / "policy.toml"
    file.write_text(tomli_w.dumps({"format": "autospec-policy", "version": 1, "default": default, **fields}))
    return file


def export(folder: Path, runtime: str, default: Any, *args: object, **fields: Any) -> tuple[Any, list[str], str]:
    """The settings, the limits, and the first line on stderr."""
    code, out, err = run(written(folder, default, **fields), "--to", runtime, "--json", *args)
    assert code == 0, err
    record = json.loads(out)
    said, *limits = err.splitlines()
    assert limits == [f"limit: {limit}" for limit in record["limits"]]
    return record["settings"], record["limits"], said


def refused(folder: Path, runtime: str, default: Any, *args: object, **fields: Any) -> str:
    code, out, err = run(written(folder, default, **fields), "--to", runtime, *args)
    assert code == 2
    assert out == ""
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    return err


def errors(runtime: str, settings: Any) -> list[str]:
    return [error.message for error in Draft202012Validator(SCHEMAS[runtime]).iter_errors(settings)]


CONSTANT = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
EXPORTS: list[tuple[str, dict[str, Any], tuple[str, ...], dict[str, Any]]] = [
    ("transformers", fixed(), (), {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 3}),
    ("transformers", fixed("assistant", 5), ("--assistant", "small"), {"num_assistant_tokens": 5, **CONSTANT}),
    ("transformers", fixed("cross_tokenizer", 2), (), {"num_assistant_tokens": 2, **CONSTANT}),
    (
        "transformers",
        fixed("early_exit", 3),
        ("--early-exit", "2"),
        {"assistant_early_exit": 2, "num_assistant_tokens": 3, **CONSTANT},
    ),
    ("transformers", fixed("heads", 3), (), {"use_mtp": True}),
    ("transformers", OFF, (), {}),
    (
        "vllm",
        fixed(),
        (),
        {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    ),
    (
        "vllm",
        fixed("suffix", 8),
        (),
        {
            "method": "suffix",
            "num_speculative_tokens": 8,
            "suffix_decoding_min_token_prob": 0.2,
            "suffix_decoding_max_spec_factor": 8.0,
            "suffix_decoding_max_tree_depth": 40,
        },
    ),
    (
        "vllm",
        fixed("assistant", 5),
        ("--assistant", "org/small"),
        {"method": "draft_model", "model": "org/small", "num_speculative_tokens": 5},
    ),
    ("vllm", fixed("heads", 2), (), {"method": "mtp", "num_speculative_tokens": 2}),
    ("vllm", OFF, (), {}),
    (
        "sglang",
        fixed(),
        (),
        {
            "--speculative-algorithm": "NGRAM",
            "--speculative-num-draft-tokens": 5,
            "--speculative-ngram-max-bfs-breadth": 1,
            "--speculative-ngram-match-type": "PROB",
            "--speculative-ngram-max-trie-depth": 7,
        },
    ),
    (
        "sglang",
        fixed("assistant", 5),
        ("--assistant", "a b/small"),
        {
            "--speculative-algorithm": "STANDALONE",
            "--speculative-draft-model-path": "a b/small",
            "--speculative-num-steps": 5,
            "--speculative-eagle-topk": 1,
            "--speculative-num-draft-tokens": 6,
        },
    ),
    (
        "sglang",
        fixed("heads", 1),
        (),
        {
            "--speculative-algorithm": "EAGLE",
            "--speculative-num-steps": 1,
            "--speculative-eagle-topk": 1,
            "--speculative-num-draft-tokens": 2,
        },
    ),
    ("sglang", OFF, (), {}),
    (
        "llama.cpp",
        fixed(),
        (),
        {
            "--spec-type": "ngram-simple",
            "--spec-ngram-simple-size-n": 3,
            "--spec-ngram-simple-size-m": 4,
            "--spec-draft-n-max": 4,
        },
    ),
    (
        "llama.cpp",
        fixed("assistant", 5),
        ("--assistant", "small.gguf"),
        {
            "--spec-type": "draft-simple",
            "--spec-draft-model": "small.gguf",
            "--spec-draft-n-max": 5,
            "--spec-draft-p-min": 0.0,
        },
    ),
    ("llama.cpp", fixed("heads", 2), (), {"--spec-type": "draft-mtp", "--spec-draft-n-max": 2}),
    ("llama.cpp", OFF, (), {"--spec-type": "none"}),
]


class TestWhatIsExported:
    @pytest.mark.parametrize(
        ("runtime", "part", "args", "expected"), EXPORTS, ids=[f"{each[0]}-{each[1]['source']}" for each in EXPORTS]
    )
    def test_it_is_what_the_runtime_documents(
        self, tmp_path: Path, runtime: str, part: Any, args: tuple[str, ...], expected: dict[str, Any]
    ) -> None:
        settings, _, said = export(tmp_path, runtime, part, *args)
        assert settings == expected
        if settings or runtime == "transformers":
            assert errors(runtime, settings) == []
        label = f"{part['source']}:{part['block_length']}" if part["block_length"] else "plain decoding"
        assert said.startswith(f"{runtime} gets {label} (default): ")
        code, out, _ = run(written(tmp_path, part), "--to", runtime, *args)
        assert code == 0
        if runtime in FLAGS:
            words = shlex.split(out)
            assert dict(zip(words[::2], words[1::2], strict=True)) == {k: str(v) for k, v in settings.items()}
        else:
            assert (json.loads(out) if out else {}) == settings

    @pytest.mark.parametrize(
        ("runtime", "said", "out"),
        [
            ("transformers", "no key", "{}\n"),
            ("vllm", "no --speculative-config at all", ""),
            ("sglang", "no --speculative-algorithm at all", ""),
            ("llama.cpp", "llama-server", "--spec-type none\n"),
        ],
    )
    def test_off_is_what_switches_speculation_off(self, tmp_path: Path, runtime: str, said: str, out: str) -> None:
        code, printed, err = run(written(tmp_path, OFF), "--to", runtime)
        assert (code, printed) == (0, out)
        assert err.startswith(f"{runtime} gets plain decoding (default): {said}")

    def test_settings_of_sources_are_those_of_the_file(self, tmp_path: Path) -> None:
        drafts = {
            "mine": {"source": "ngram", "settings": {"max_ngram": 5, "min_ngram": 2, "continuation": "newest"}},
            "sure": {"source": "suffix", "settings": {"min_score": 0.5, "learns": False}},
        }
        default = fixed("mine", 6)
        settings, limits, _ = export(tmp_path, "transformers", default, drafts=drafts)
        assert settings == {"prompt_lookup_num_tokens": 6, "max_matching_ngram_size": 5}
        assert "matches of fewer than 2 tokens are drafted from too" in limits
        settings, _, _ = export(tmp_path, "vllm", default, drafts=drafts)
        assert (settings["prompt_lookup_max"], settings["prompt_lookup_min"]) == (5, 2)
        settings, limits, _ = export(tmp_path, "sglang", default, drafts=drafts)
        assert settings["--speculative-ngram-match-type"] == "BFS"
        assert settings["--speculative-ngram-max-trie-depth"] == 11
        _, limits, _ = export(tmp_path, "llama.cpp", default, drafts=drafts)
        assert not any("of several matches" in limit for limit in limits)  # both copy after the newest
        settings, _, _ = export(tmp_path, "vllm", fixed("sure", 3), drafts=drafts)
        assert settings["suffix_decoding_min_token_prob"] == 0.5
        assert settings["suffix_decoding_max_cached_requests"] == 0
        assert errors("vllm", settings) == []

    def test_variants_of_autospec_tune_are_known_without_being_in_the_file(self, tmp_path: Path) -> None:
        settings, limits, said = export(tmp_path, "vllm", fixed("ngram_by_match", 4))
        assert settings["prompt_lookup_max"] == 5
        assert any("tokens_per_match=2" in limit for limit in limits)
        assert said.startswith("vllm gets ngram_by_match:4")

    def test_policy_fixed_is_a_fixed_action_too(self, tmp_path: Path) -> None:
        settings, limits, _ = export(
            tmp_path, "vllm", {"policy": "fixed", "settings": fixed("ngram", 7), "sources": ["ngram"], "pooled": True}
        )
        assert settings["num_speculative_tokens"] == 7
        assert not any("block by block" in limit for limit in limits)


class TestLimits:
    @pytest.mark.parametrize("runtime", RUNTIMES)
    def test_blocks_that_end_by_confidence(self, tmp_path: Path, runtime: str) -> None:
        args = ("--assistant", "small.gguf")
        for stop in ({"least_margin": 0.3}, {"most_entropy": 2.0}):
            settings, limits, _ = export(tmp_path, runtime, fixed("assistant", 5, **stop), *args)
            assert settings == export(tmp_path, runtime, fixed("assistant", 5), *args)[0]
            assert any("least_margin, most_entropy" in limit for limit in limits)
        assert not any("least_margin" in limit for limit in export(tmp_path, runtime, fixed("assistant"), *args)[1])

    @pytest.mark.parametrize("runtime", RUNTIMES)
    def test_other_segments_are_named(self, tmp_path: Path, runtime: str) -> None:
        segments = {"code": fixed("ngram", 8), "a\nb": OFF, "same": fixed()}
        _, limits, _ = export(tmp_path, runtime, fixed(), segments=segments)
        assert limits[0].endswith(r"get the default's too ('code', 'a\nb')")
        _, limits, said = export(tmp_path, runtime, fixed(), "--segment", "code", segments=segments)
        assert limits[0] == "a runtime has one setting: what segment 'code' has goes to all traffic"
        assert "ngram:8 (segments.code)" in said
        assert not any("one setting" in limit for limit in export(tmp_path, runtime, fixed())[1])

    @pytest.mark.parametrize("runtime", ["vllm", "sglang", "llama.cpp"])
    def test_servers_decode_more_than_one_sequence(self, tmp_path: Path, runtime: str) -> None:
        _, limits, _ = export(tmp_path, runtime, fixed())
        assert any(limit.startswith("tuned for one sequence at a time") for limit in limits)

    def test_what_was_given_and_is_no_use(self, tmp_path: Path) -> None:
        _, limits, _ = export(tmp_path, "vllm", fixed(), "--assistant", "small", "--early-exit", 2)
        assert "--assistant small is not used" in limits
        assert "--early-exit 2 is not used" in limits

    def test_where_the_assistant_goes_in_transformers(self, tmp_path: Path) -> None:
        _, limits, said = export(tmp_path, "transformers", fixed("assistant"), "--assistant", "small")
        assert "the assistant's" in said or "of the assistant" in said
        assert "the assistant is to be passed: generate(..., assistant_model=small)" in limits
        _, limits, _ = export(tmp_path, "transformers", fixed("cross_tokenizer"))
        assert any(limit.endswith("assistant_model=..., tokenizer=..., assistant_tokenizer=...)") for limit in limits)


GUARD = {"policy": "guard", "settings": {"policy": {"policy": "goodput", "settings": {}}, "control_share": 0.02}}


class TestAdaptive:
    @pytest.mark.parametrize(
        "part",
        [GUARD, {"policy": "goodput"}, {"policy": "hedge", "sources": ["ngram"]}, {"policy": "linucb", "settings": {}}],
        ids=lambda part: part["policy"],
    )
    def test_the_best_fixed_action_stands_for_it(self, tmp_path: Path, part: Any) -> None:
        made = {"best_fixed": fixed("ngram", 6), "best_fixed_by_segment": {"code": fixed("ngram", 12), "chat": OFF}}
        settings, limits, said = export(tmp_path, "vllm", part, made=made)
        assert settings["num_speculative_tokens"] == 6
        assert "(made.best_fixed)" in said
        assert limits[0].startswith(f"default is policy '{part['policy']}")
        assert "which decides block by block: exported is the best fixed action" in limits[0]
        settings, limits, said = export(tmp_path, "vllm", part, "--segment", "code", made=made)
        assert settings["num_speculative_tokens"] == 12
        assert "(made.best_fixed_by_segment.code)" in said
        settings, _, said = export(tmp_path, "vllm", part, "--segment", "chat", made=made)
        assert settings == {}
        assert said.startswith("vllm gets plain decoding (made.best_fixed_by_segment.chat)")

    def test_a_segment_without_one_has_that_of_all_traffic(self, tmp_path: Path) -> None:
        fields = {"segments": {"code": {"policy": "hedge"}}, "made": {"best_fixed": fixed("ngram", 6)}}
        settings, limits, _ = export(tmp_path, "vllm", OFF, "--segment", "code", **fields)
        assert settings["num_speculative_tokens"] == 6
        assert any("made.best_fixed, of all traffic" in limit for limit in limits)

    def test_without_one_it_is_refused(self, tmp_path: Path) -> None:
        said = refused(tmp_path, "vllm", {"policy": "hedge"}, made={"by": "hand"})
        assert (
            "default is policy 'hedge', which decides block by block, and the file knows no best fixed action" in said
        )
        assert "autospec tune" in said

    @pytest.mark.parametrize(
        ("made", "said"),
        [
            ({"best_fixed": {"policy": "hedge"}}, "made.best_fixed: a fixed action is needed"),
            ({"best_fixed": {"source": "ngram"}}, "made.best_fixed: "),
            ({"best_fixed": fixed("ngram", -1)}, "made.best_fixed: block_length=-1"),
            ({"best_fixed": fixed(["ngram"], 4)}, "source=['ngram']: the name of a draft source is needed"),  # type: ignore[arg-type]
            ({"best_fixed_by_segment": [1]}, "made.best_fixed_by_segment: an object is needed, not [1]"),
        ],
    )
    def test_one_that_is_none_is_named(self, tmp_path: Path, made: Any, said: str) -> None:
        assert said in refused(tmp_path, "vllm", {"policy": "hedge"}, made=made)


class TestRefusals:
    @pytest.mark.parametrize(
        ("runtime", "source", "nearest"),
        [
            ("transformers", "suffix", "prompt lookup"),
            ("transformers", "blend", "that source alone"),
            ("vllm", "early_exit", "policy of assistant"),
            ("vllm", "cross_tokenizer", "policy of assistant"),
            ("vllm", "blend", "one source alone"),
            ("sglang", "suffix", "NGRAM"),
            ("sglang", "early_exit", "policy of assistant"),
            ("sglang", "cross_tokenizer", "policy of assistant"),
            ("sglang", "blend", "one source alone"),
            ("llama.cpp", "suffix", "ngram-mod"),
            ("llama.cpp", "early_exit", "policy of assistant"),
            ("llama.cpp", "cross_tokenizer", "policy of assistant"),
            ("llama.cpp", "blend", "fixed order"),
            *((runtime, "somebody_elses", "none of autospec's own") for runtime in RUNTIMES),
        ],
    )
    def test_what_has_no_counterpart(self, tmp_path: Path, runtime: str, source: str, nearest: str) -> None:
        said = refused(tmp_path, runtime, fixed(source))
        assert f"cannot be told to draft by '{source}'" in said
        assert nearest in said

    @pytest.mark.parametrize("runtime", ["vllm", "sglang", "llama.cpp"])
    def test_an_assistant_without_a_name(self, tmp_path: Path, runtime: str) -> None:
        assert "give --assistant" in refused(tmp_path, runtime, fixed("assistant"))

    def test_early_exit_without_layers(self, tmp_path: Path) -> None:
        assert "give --early-exit" in refused(tmp_path, "transformers", fixed("early_exit"))

    def test_an_assistant_that_llama_cpp_cannot_read(self, tmp_path: Path) -> None:
        assert "ends in .gguf" in refused(tmp_path, "llama.cpp", fixed("assistant"), "--assistant", "org/small")

    def test_blocks_that_llama_cpp_does_not_take(self, tmp_path: Path) -> None:
        export(tmp_path, "llama.cpp", fixed("ngram", 1024))
        assert "at most 1024 tokens, not 1025" in refused(tmp_path, "llama.cpp", fixed("ngram", 1025))

    def test_a_segment_that_is_not_there(self, tmp_path: Path) -> None:
        fields = {"segments": {"code": OFF}, "made": {"best_fixed_by_segment": {"chat": OFF}}}
        said = refused(tmp_path, "vllm", fixed(), "--segment", "poems", **fields)
        assert "no segment 'poems': known are chat, code" in said
        assert "it has none, leave --segment out" in refused(tmp_path, "vllm", fixed(), "--segment", "poems")

    def test_files_that_are_none(self, tmp_path: Path) -> None:
        code, out, err = run(tmp_path / "none.toml", "--to", "vllm")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "none.toml" in err
        assert "unknown policy 'magic'" in refused(tmp_path, "vllm", {"policy": "magic"})
        assert "segments.code" in refused(tmp_path, "vllm", OFF, segments={"code": {"source": "ngram"}})
        assert "unknown field 'colour'" in refused(tmp_path, "vllm", OFF, colour=1)
        assert "drafts.mine" in refused(
            tmp_path, "vllm", fixed("mine"), drafts={"mine": {"source": "ngram", "settings": {"max_ngram": 0}}}
        )


class TestOut:
    def test_it_holds_what_would_be_printed(self, tmp_path: Path) -> None:
        for runtime in RUNTIMES:
            for part in (fixed(), OFF):
                file, out = written(tmp_path, part), tmp_path / "out.txt"
                code, printed, _ = run(file, "--to", runtime, "--out", out)
                assert (code, printed) == (0, "")
                assert out.read_text() == run(file, "--to", runtime)[1]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out.txt", "policy.toml"]

    def test_it_is_written_whole_or_not_at_all(self, tmp_path: Path) -> None:
        out = tmp_path / "out.json"
        out.write_text("before")
        refused(tmp_path, "transformers", fixed("suffix"), "--out", out)
        assert out.read_text() == "before"
        code, _, err = run(written(tmp_path, fixed()), "--to", "vllm", "--out", tmp_path / "nowhere" / "out.json")
        assert code == 1
        assert err.count("\n") == 1
        assert "nowhere" in err
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "policy.toml"]


class TestSchemas:
    """Of each, faults are planted that a runtime would refuse, or overlook."""

    @pytest.mark.parametrize(
        ("runtime", "change"),
        [
            ("transformers", {"prompt_lookup_tokens": 4}),
            ("transformers", {"prompt_lookup_num_tokens": 4.5}),
            ("transformers", {"prompt_lookup_num_tokens": 0}),
            ("transformers", {"num_assistant_tokens_schedule": "steady"}),
            ("transformers", {"assistant_confidence_threshold": "0.4"}),
            ("vllm", {"speculative_tokens": 4}),
            ("vllm", {"num_speculative_tokens": "4"}),
            ("vllm", {"num_speculative_tokens": 0}),
            ("vllm", {"num_speculative_tokens": True}),
            ("vllm", {"method": "prompt_lookup"}),
            ("vllm", {"method": "draft_model"}),
            ("vllm", {"suffix_decoding_min_token_prob": 1.5}),
            ("vllm", {"num_speculative_tokens_per_batch_size": [[1, 64]]}),
            ("sglang", {"--speculative-ngram-max-match-window-size": 3}),
            ("sglang", {"--speculative-num-draft-tokens": "5"}),
            ("sglang", {"--speculative-algorithm": "PROMPT"}),
            ("sglang", {"--speculative-algorithm": "STANDALONE"}),
            ("sglang", {"--speculative-num-steps": 4}),
            ("sglang", {"--speculative-ngram-max-trie-depth": 1}),
            ("llama.cpp", {"--draft-max": 4}),
            ("llama.cpp", {"--spec-type": "ngram"}),
            ("llama.cpp", {"--spec-type": "draft-simple"}),
            ("llama.cpp", {"--spec-ngram-simple-size-m": 1025}),
            ("llama.cpp", {"--spec-draft-p-min": 2.0}),
        ],
        ids=lambda value: value if isinstance(value, str) else next(iter(value)),
    )
    def test_faults_are_caught(self, tmp_path: Path, runtime: str, change: dict[str, Any]) -> None:
        settings, _, _ = export(tmp_path, runtime, fixed())
        assert errors(runtime, settings) == []
        assert errors(runtime, {**settings, **change})

    def test_a_schedule_by_batch_size_is_as_vllm_documents_it(self) -> None:
        schedule = {"num_speculative_tokens_per_batch_size": [[1, 64, 3], [65, 128, 1], [129, 512, 0]]}
        assert errors("vllm", {"method": "eagle", "model": "m", "num_speculative_tokens": 3, **schedule}) == []

    def test_keys_of_transformers_are_those_of_the_installed_one(self) -> None:
        assert set(SCHEMAS["transformers"]["properties"]) <= set(vars(GenerationConfig()))

    def test_every_runtime_has_one(self) -> None:
        assert set(SCHEMAS) == set(registry.RUNTIMES) == set(RUNTIMES)


@contextmanager
def widths(model: Any) -> Iterator[list[int]]:
    """Tokens of each forward."""
    seen: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    yield seen
    hook.remove()


class TestInTransformers:
    """Exported keys, in the installed transformers."""

    def config(self, folder: Path, part: Any, *args: object, **options: Any) -> GenerationConfig:
        """Through the file that transformers reads."""
        out = folder / "generation_config.json"
        assert run(written(folder, part), "--to", "transformers", "--out", out, *args)[0] == 0
        config = GenerationConfig.from_pretrained(folder)
        config.validate(strict=True)
        config.update(**options)
        return config

    def test_prompt_lookup_copies_so_many_tokens(self, tmp_path: Path, target: Any) -> None:
        plain = target.generate(tiny.prompt(), max_new_tokens=30, do_sample=False)
        for length in (2, 5):
            config = self.config(tmp_path, fixed("ngram", length), max_new_tokens=30, do_sample=False)
            with widths(target) as seen:
                answer = target.generate(tiny.prompt(), generation_config=config)
            assert torch.equal(answer, plain)
            assert seen[0] == 20 + length
            assert max(seen[1:]) == length + 1
            assert len(seen) < 30

    def test_off_is_plain(self, tmp_path: Path, target: Any) -> None:
        config = self.config(tmp_path, OFF, max_new_tokens=12, do_sample=False)
        with widths(target) as seen:
            target.generate(tiny.prompt(), generation_config=config)
        assert seen == [20] + [1] * 11

    def test_the_assistant_drafts_blocks_of_one_length(self, tmp_path: Path, target: Any) -> None:
        """Though it is often unsure: with transformers' own threshold, blocks end."""
        assistant = tiny.near_copy(target, noise=0.3)
        options = {"max_new_tokens": 40, "do_sample": False}
        assistant.generation_config = self.config(tmp_path, fixed("assistant", 5))
        with widths(target) as seen:
            target.generate(tiny.prompt(), assistant_model=assistant, **options)
        assert seen[0] == 25
        assert set(seen[1:-1]) == {6}
        assistant.generation_config.assistant_confidence_threshold = None
        with widths(target) as seen:
            target.generate(tiny.prompt(), assistant_model=assistant, **options)
        assert set(seen[1:-1]) != {6}

    def test_the_first_layers_draft(self, tmp_path: Path, target: Any) -> None:
        plain = target.generate(tiny.prompt(), max_new_tokens=20, do_sample=False)
        part = fixed("early_exit", 4)
        config = self.config(tmp_path, part, "--early-exit", 2, max_new_tokens=20, do_sample=False)
        before, target.generation_config = target.generation_config, config
        try:
            with widths(target) as seen:
                answer = target.generate(tiny.prompt())
        finally:
            target.generation_config = before
        assert torch.equal(answer, plain)
        assert 5 in seen

    def test_multi_token_prediction_layers_draft(self, tmp_path: Path) -> None:
        target = tiny_heads.llama(tmp_path / "target", num_mtp_layers=2)
        options = {"max_new_tokens": 20, "do_sample": False}
        plain = target.generate(tiny.prompt(), **options)
        config = self.config(tmp_path, fixed("heads", 2), **options)
        with widths(target) as seen:
            answer = target.generate(tiny.prompt(), generation_config=config)
        assert torch.equal(answer, plain)
        assert max(seen[1:]) == 3


class TestDocs:
    def test_examples_are_what_the_command_prints(self, tmp_path: Path) -> None:
        text = DOCS.read_text(encoding="utf-8")
        (policy,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
        (tmp_path / "policy.toml").write_text(policy)
        examples = re.findall(r"```console\n\$ autospec export policy\.toml (.*?)\n(.*?)```", text, re.DOTALL)
        assert {args.split()[1] for args, _ in examples} == set(RUNTIMES)
        for args, printed in examples:
            code, out, err = run(tmp_path / "policy.toml", *args.split())
            assert code == 0, err
            assert (err + out).strip() == printed.strip(), args

    def test_every_source_and_runtime_is_in_the_table(self) -> None:
        text = DOCS.read_text(encoding="utf-8")
        for source in ("none", *BY_NAME, *NEEDS_OBJECT):
            assert f"\n| `{source}`" in text
        for runtime in ("transformers", "vLLM", "SGLang", "llama.cpp"):
            assert f" {runtime} |" in text

    def test_options_have_help_and_an_environment_variable(self) -> None:
        code, out, _ = run("--help")
        assert code == 0
        options = [option for option in command.params if option.param_type_name == "option"]
        assert all(option.help for option in options)  # type: ignore[attr-defined]
        assert out.replace("\n", "").replace(" ", "").count("envvar:AUTOSPEC_EXPORT_") == len(options)
