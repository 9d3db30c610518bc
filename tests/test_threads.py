"""Requests in several threads: no noise is handed out twice, and each may bring a generator of its own."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tiny
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import autospec
from autospec.drafts import Assistant
from autospec.policies import Fixed
from autospec.randomness import TorchRandomness, plain_draws, spared

pytestmark = pytest.mark.compat

CPU = torch.device("cpu")
WAIT = 20.0  # seconds at most


class Stage:
    """Two requests in two threads; the slow one sits in its policy while the fast one draws."""

    def __init__(self) -> None:
        self.is_choosing, self.may_choose, self.has_chosen, self.may_end = (threading.Event() for _ in range(4))
        self.states: list[int] = []  # of the global generator, before each draw of the fast request

    def policy(self) -> Any:
        stage = self

        class Waits(Fixed):
            def choose(self, context: Any) -> Any:
                stage.is_choosing.set()
                stage.may_choose.wait(WAIT)
                torch.rand(3)  # a policy that draws for itself
                return super().choose(context)

        return Waits("ngram", block_length=2)

    def slow_steps(self) -> LogitsProcessor:
        stage = self

        class SlowSteps(LogitsProcessor):
            calls = 0

            def __call__(self, input_ids: Any, scores: Any) -> Any:
                self.calls += 1
                if self.calls == 2:
                    stage.has_chosen.set()
                    stage.may_end.wait(WAIT)
                return scores

        return SlowSteps()

    def watches(self) -> LogitsProcessor:
        stage = self

        class Watches(LogitsProcessor):
            def __call__(self, input_ids: Any, scores: Any) -> Any:
                if len(stage.states) == 6:
                    stage.may_choose.set()
                    stage.has_chosen.wait(WAIT)
                stage.states.append(hash(torch.get_rng_state().numpy().tobytes()))
                return scores

        return Watches()


@pytest.mark.parametrize("fast_is", ["by blocks", "control"])
def test_noise_is_not_handed_out_twice(fast_is: str) -> None:
    slow, fast, stage = tiny.llama(seed=0), tiny.llama(seed=1), Stage()
    options: dict[str, Any] = {"do_sample": True}
    with autospec.wrap(slow, policy=stage.policy()), autospec.wrap(fast, policy="fixed:ngram:2") as speculator:
        torch.manual_seed(0)

        def slowly() -> None:
            processors = LogitsProcessorList([stage.slow_steps()])
            slow.generate(tiny.prompt(20), max_new_tokens=2, logits_processor=processors, **options)

        def fast_one() -> None:
            processors = LogitsProcessorList([stage.watches()])
            fast.generate(tiny.prompt(20), max_new_tokens=12, logits_processor=processors, **options)

        thread = threading.Thread(target=slowly)
        thread.start()
        assert stage.is_choosing.wait(WAIT)
        if fast_is == "control":
            with speculator.control():
                fast_one()
        else:
            fast_one()
        stage.may_end.set()
        thread.join()
    assert len(stage.states) == 12
    assert len(set(stage.states)) == 12


@pytest.mark.parametrize("sampling", ["paired", "maximal"])
def test_each_thread_with_its_own_generator_says_what_it_says_alone(sampling: str) -> None:
    model = tiny.llama()
    prompts = [tiny.prompt(12 + i, seed=i) for i in range(6)]

    def one(index: int) -> list[int]:
        generator = torch.Generator().manual_seed(index)
        options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": True, "temperature": 0.6}
        return model.generate(prompts[index], generator=generator, **options)[0].tolist()  # type: ignore[no-any-return]

    draft = Assistant(tiny.near_copy(model))
    with autospec.wrap(model, drafts=[draft], policy="fixed:assistant:3", sampling=sampling):
        alone = [one(index) for index in range(6)]
        with ThreadPoolExecutor(3) as pool:
            together = list(pool.map(one, list(range(6)) * 3))
    assert together == alone * 3


def elsewhere(call: Any) -> None:
    """In another thread."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


class TestSettingBack:
    def test_what_others_draw_meanwhile_stays_used(self) -> None:
        torch.manual_seed(0)
        before = torch.get_rng_state()
        with spared(CPU):
            torch.rand(5)
        assert torch.equal(torch.get_rng_state(), before)
        with spared(CPU):  # a request of this thread: a draft source that asks another wrapped model
            TorchRandomness(CPU).categorical(torch.tensor([0.5, 0.5]))
            with plain_draws(None):
                torch.rand(2)
        assert torch.equal(torch.get_rng_state(), before)
        with spared(CPU):
            elsewhere(lambda: TorchRandomness(CPU).categorical(torch.tensor([0.5, 0.5])))
            after = torch.get_rng_state()
        assert torch.equal(torch.get_rng_state(), after)

    @pytest.mark.parametrize("draws_ahead", [False, True])
    def test_a_rewind_after_others_drew_is_left_out(self, draws_ahead: bool) -> None:
        torch.manual_seed(0)
        probs = torch.full((3, 4), 0.25)
        randomness = TorchRandomness(CPU, draws_ahead=draws_ahead)
        expected = [randomness.fork().categorical(probs[0])]
        start = torch.get_rng_state()
        drawn = randomness.walk(probs, expected)
        assert len(drawn) > 1
        randomness.rewind(0)
        assert torch.equal(torch.get_rng_state(), start)
        assert randomness.walk(probs, expected) == drawn
        elsewhere(lambda: TorchRandomness(CPU).categorical(probs[0]))
        later = torch.get_rng_state()
        randomness.rewind(0)
        assert torch.equal(torch.get_rng_state(), later)

    @pytest.mark.parametrize("shares", [False, True])
    def test_a_generator_that_others_moved_is_left_there(self, shares: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        probs = torch.full((3, 4), 0.25)
        randomness = TorchRandomness(CPU, generator)
        start = generator.get_state()
        randomness.walk(probs, [randomness.fork().categorical(probs[0])])
        if shares:
            torch.rand(1, generator=generator)
        later = generator.get_state()
        randomness.rewind(0)
        assert torch.equal(generator.get_state(), later if shares else start)

    @pytest.mark.parametrize("draws_ahead", [False, True])
    def test_while_transformers_decodes_elsewhere_nothing_is_set_back(self, draws_ahead: bool) -> None:
        torch.manual_seed(0)
        started, may_end = threading.Event(), threading.Event()

        def plain() -> None:
            with plain_draws(None):
                started.set()
                may_end.wait(WAIT)

        thread = threading.Thread(target=plain)
        thread.start()
        assert started.wait(WAIT)
        with spared(CPU):
            torch.rand(2)
            after = torch.get_rng_state()
        assert torch.equal(torch.get_rng_state(), after)
        randomness = TorchRandomness(CPU, draws_ahead=draws_ahead)
        randomness.walk(torch.full((2, 4), 0.25), [-1])
        after = torch.get_rng_state()
        randomness.rewind(0)
        assert torch.equal(torch.get_rng_state(), after)
        may_end.set()
        thread.join()

    def test_the_global_generator_itself_is_no_generator_of_ones_own(self) -> None:
        model = tiny.llama()
        options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True, "generator": torch.default_generator}
        with autospec.wrap(model, policy="off") as speculator, speculator.control():
            texts = {tuple(model.generate(tiny.prompt(12), **options)[0].tolist()) for _ in range(4)}
        assert len(texts) > 1

    def test_a_generator_in_place_of_the_global_one(self) -> None:
        generator = torch.Generator().manual_seed(7)
        before = torch.get_rng_state()
        with plain_draws(generator):
            drawn = torch.rand(4)
        again = torch.Generator().manual_seed(7)
        assert torch.equal(drawn, torch.rand(4, generator=again))
        assert torch.equal(generator.get_state(), again.get_state())
        assert torch.equal(torch.get_rng_state(), before)


def test_a_child_forked_while_others_decode_can_decode() -> None:
    """A lock that another thread held at the fork is a new one in the child."""
    import os
    import time

    from autospec.controller import Controller
    from autospec.policies import Fixed

    controller = Controller(Fixed())
    with controller._lock:  # as another thread's at this moment
        child = os.fork()
        if child == 0:
            done = controller._lock.acquire(timeout=5)
            os._exit(0 if done else 1)
    deadline = time.monotonic() + 20
    while (found := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found == (child, 0)
