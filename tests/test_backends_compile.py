"""Compiled forwards: exact, and compiled at start-up alone. Which backend is taken, by what was measured."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from test_backends import both
from test_decoder import Alternating, Oracle
from torch._dynamo.utils import counters

import autospec
from autospec import backend_choice
from autospec.backends import Static
from autospec.costs import speedups
from autospec.drafts import Assistant, NGram
from autospec.policies import Fixed

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile needs a C++ compiler"
)
COMPILED = Static("inductor", widths=(1, 4), capacities=(128,))


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.llama(dtype=torch.float32)


@pytest.fixture(scope="module")
def draft(target: Any) -> Any:
    return tiny.near_copy(target)


@pytest.fixture(scope="class")
def speculator(target: Any, draft: Any) -> Iterator[Any]:
    policy = Alternating(*[(source, k) for k in range(17) for source in ("assistant", "ngram")])
    with autospec.wrap(
        target, drafts=[Assistant(draft), NGram(min_ngram=1)], policy=policy, backend=COMPILED
    ) as wrapped:
        assert wrapped.backend.name == "inductor", wrapped.backend
        yield wrapped


@needs_compiler
class TestCompiled:
    def test_the_same_tokens_and_no_compilation_in_service(self, target: Any, speculator: Any) -> None:
        """Fifty requests of all block lengths, greedy and sampled."""
        assert speculator.backend.captures == 4  # two widths, of target and draft
        graphs, frames = dict(counters["stats"]), dict(counters["frames"])
        for number in range(50):
            ids = tiny.prompt(5 + number, number)
            options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": number % 2 == 1, "temperature": 0.7}
            torch.manual_seed(number)
            found = target.generate(ids, **options)
            assert speculator.last_request.notes is None
            assert speculator.last_request.fallback_reason is None
            with speculator.control():
                torch.manual_seed(number)
                assert torch.equal(target.generate(ids, **options), found), number
        assert speculator.backend.captures == 4
        assert dict(counters["stats"]) == graphs
        assert dict(counters["frames"]) == frames

    def test_in_inference_mode(self, target: Any, speculator: Any) -> None:
        with torch.inference_mode():
            found = target.generate(tiny.prompt(20), max_new_tokens=24, do_sample=False)
            assert speculator.last_request.notes is None
        assert speculator.backend.captures == 4
        with speculator.control():
            assert torch.equal(target.generate(tiny.prompt(20), max_new_tokens=24, do_sample=False), found)

    def test_weights_changed_in_place_are_seen(self, target: Any, speculator: Any) -> None:
        with torch.no_grad():
            before = target.lm_head.weight.clone()
            target.lm_head.weight.copy_(before.roll(1, dims=0))
        try:
            found = target.generate(tiny.prompt(20), max_new_tokens=24, do_sample=False)
            assert speculator.last_request.notes is None
            with speculator.control():
                assert torch.equal(target.generate(tiny.prompt(20), max_new_tokens=24, do_sample=False), found)
        finally:
            with torch.no_grad():
                target.lm_head.weight.copy_(before)


def test_a_graph_that_breaks_is_left_eager() -> None:
    class Breaking(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return self.inner(hidden)  # type: ignore[no-any-return]

    model = tiny.llama(dtype=torch.float32)
    model.model.layers[0].mlp = Breaking(model.model.layers[0].mlp)
    ids = tiny.prompt(20)
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)
    with pytest.warns(UserWarning, match="forwards run eagerly: torch.compile failed"):
        speculator = autospec.wrap(model, drafts=["ngram"], policy=Fixed("ngram", block_length=3), backend=COMPILED)
    with speculator:
        assert speculator.backend.name == "eager"
        assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), plain)


def test_without_a_compiler() -> None:
    import torch._inductor.config as config

    model = tiny.llama(seed=8, dtype=torch.float32, num_hidden_layers=1)  # of which nothing is compiled yet
    with (
        config.patch({"cpp.cxx": (None, "no-such-compiler"), "force_disable_caches": True}),
        pytest.warns(UserWarning, match="forwards run eagerly: torch.compile failed"),
    ):
        speculator = autospec.wrap(
            model, drafts=["ngram"], policy="off", backend=Static("inductor", widths=(1,), capacities=(72,))
        )
    with speculator:
        assert speculator.backend.name == "eager"
        assert "compiler" in speculator.backend.reason.lower()


class TestChoice:
    """What `auto` and `compile` take: preparing is replaced by the plain runner's."""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AUTOSPEC_COSTS", str(tmp_path))
        monkeypatch.setattr("autospec.backends.making.InductorRunner", PretendedCompiler)

    def _backend(self, target: Any, backend: str, monkeypatch: pytest.MonkeyPatch, *ratios: float) -> Any:
        """With speed-ups that are measured now."""
        if ratios:
            monkeypatch.setattr(
                backend_choice, "measure_speedups", lambda static: dict(zip((1, 17), ratios, strict=True))
            )
        with autospec.wrap(target, drafts=["ngram"], policy="off", backend=backend) as speculator:
            return speculator.backend

    def test_auto_compiles_nothing_where_nothing_was_measured(self, target: Any, monkeypatch: Any) -> None:
        backend = self._backend(target, "auto", monkeypatch)
        assert backend.name == "eager"
        assert "was not measured here" in backend.reason

    def test_auto_takes_what_was_measured_to_be_faster(self, target: Any, monkeypatch: Any) -> None:
        compiled = self._backend(target, "compile", monkeypatch, 1.2, 1.05)
        assert compiled.name == "inductor"
        assert compiled.reason == "asked for"
        auto = self._backend(target, "auto", monkeypatch, 1.2, 1.05)
        assert auto.name == "inductor"
        assert auto.reason == "measured to be faster"
        assert auto.speedups == {1: 1.2, 17: 1.05}

    @pytest.mark.parametrize("ratios", [(1.4, 1.02), (0.9, 1.5), (1.0, 1.0)])
    def test_auto_leaves_what_was_measured_not_to_be(self, target: Any, ratios: Any, monkeypatch: Any) -> None:
        compiled = self._backend(target, "compile", monkeypatch, *ratios)
        assert compiled.name == "inductor"
        assert ("though measured at" in compiled.reason) == (min(ratios) < 1.0)
        auto = self._backend(target, "auto", monkeypatch)
        assert auto.name == "eager"
        assert f"; compiled forwards were measured at {min(ratios):.2f} times the speed" in auto.reason

    def test_what_was_faster_and_no_longer_is(self, target: Any, monkeypatch: Any) -> None:
        self._backend(target, "compile", monkeypatch, 1.2, 1.2)
        auto = self._backend(target, "auto", monkeypatch, 1.2, 0.9)
        assert auto.reason == "prepared forwards were measured at 0.90 times the speed"

    @pytest.mark.parametrize(
        "content",
        [
            "",
            "[]",
            '{"format": 1}',
            '{"format": 1, "fingerprint": {}, "speedups": {"1": 2.0}}',
            '{"format": 99, "fingerprint": "same", "speedups": {"1": 2.0}}',
            '{"format": 1, "fingerprint": "same", "speedups": {}}',
            '{"format": 1, "fingerprint": "same", "speedups": {"1": -2.0}}',
            '{"format": 1, "fingerprint": "same", "speedups": {"1": NaN}}',
            '{"format": 1, "fingerprint": "same", "speedups": [2.0]}',
        ],
    )
    def test_a_damaged_file_is_told_and_not_used(
        self, target: Any, content: str, tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        self._backend(target, "compile", monkeypatch, 1.2, 1.2)
        (path,) = tmp_path.glob("backend-*.json")
        same = json.dumps(json.loads(path.read_text(encoding="utf-8"))["fingerprint"])
        path.write_text(content.replace('"same"', same), encoding="utf-8")
        assert self._backend(target, "auto", monkeypatch).name == "eager"
        assert "what was measured of the backend is not used" in caplog.text

    def test_what_was_measured_of_another_model_is_not_used(self, target: Any, monkeypatch: Any) -> None:
        self._backend(target, "compile", monkeypatch, 1.2, 1.2)
        assert self._backend(tiny.llama(), "auto", monkeypatch).name == "eager"

    def test_speedups_are_measured(self, target: Any) -> None:
        with autospec.wrap(target, drafts=["ngram"], policy="off", backend=Static("plain")) as speculator:
            static = speculator.backend.target
            assert static is not None
            found = speedups.measure_speedups(static, repeats=3)
            assert set(found) == {1, 17}
            assert all(0.0 < ratio < 100.0 for ratio in found.values())
            assert static.length == 0


class PretendedCompiler:
    """Prepares nothing, under the compiler's name."""

    name = "inductor"
    memory_bytes = 0
    num_captures = 0

    def prepare(self, forward: Any) -> Any:
        self.num_captures += 1
        return forward


@needs_compiler
def test_compiled_blocks_after_rejections(target: Any) -> None:
    ids = tiny.prompt(20)
    answer = target.generate(ids, max_new_tokens=40, do_sample=False)[0].tolist()
    plain, found, record = both(
        target,
        ids,
        drafts=[Oracle(answer, spoil_every=4)],
        policy=Fixed("oracle", block_length=6),
        backend=COMPILED,
        max_new_tokens=40,
        do_sample=False,
    )
    assert torch.equal(plain, found)
    assert 0 < record.num_accepted_tokens < record.num_judged_tokens
