"""Where every random draw of decoding comes from, behind one small interface.

Production backs it with a torch generator; an exhaustive enumeration of all draws can stand in its place.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Protocol

import torch
from torch import Tensor


class Randomness(Protocol):
    """Draws of categories and of yes or no."""

    def categorical(self, probs: Tensor) -> int:
        """Draw an index. Args: probs: [vocab_size], sums to 1."""

    def category(self, probs: Tensor) -> Tensor:
        """As `categorical`, with the index, [], left on the device."""

    def walk(self, probs: Tensor, expected: Sequence[int]) -> list[int]:
        """Draw one index a row, in order, for as long as each is the expected one.

        Args:
            probs: [n, vocab_size], each row sums to 1.
            expected: [n - 1] or [n]; the last row of n has nothing to expect when one is missing.

        Returns:
            what was drawn, the first that differs included; the noise is then used once for each.
        """

    def rewind(self, num_draws: int) -> None:
        """Only the first draws of the last `walk` count: the noise of the others is the next to be used.

        Of a walk over a single row nothing is taken back.
        """

    def num_successes(self, probabilities: Tensor) -> Tensor:
        """How many independent yes-or-no draws come true before the first that does not.

        Args:
            probabilities: [n], of a yes.

        Returns:
            [], int64, on the same device.
        """

    def fork(self) -> Randomness:
        """A copy that will draw with the noise this one uses next, while this one stays as it is."""


class _Mine(threading.local):
    taken = 0
    num_plain = 0


class _Turns:
    """Whose turn it is with torch's global generators, which all threads share.

    Setting a global generator back would hand noise out twice if another thread had drawn meanwhile. So every draw of a
    request counts as a turn, and the generator is set back only where no other thread took one in between.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held for a walk at most, never while code of others runs
        self._taken = 0
        self._num_plain = 0  # requests that transformers decodes now, whose draws are not seen here
        self._mine = _Mine()

    def take(self, *, plain: int = 0) -> None:
        """Count a turn, and a plain request that begins (1) or ends (-1)."""
        self._taken += 1
        self._num_plain += plain
        self._mine.taken += 1
        if plain:
            self._mine.num_plain += plain

    def of_others(self) -> int:
        """Turns that other threads have taken so far."""
        return self._taken - self._mine.taken

    def is_alone(self) -> bool:
        """No other thread has a plain request running."""
        return self._num_plain == self._mine.num_plain


_turns = _Turns()
_one_at_a_time = threading.RLock()  # plain requests with a generator in the global one's place


class TorchRandomness:
    """Draws as transformers' `generate` does: what one `torch.multinomial` call per token gives.

    On the CPU `walk` draws row by row and stops. Elsewhere each look at a drawn token waits for the device, so that all
    rows are drawn first, looked at together, and the generator is set back to where the last draw that counts left it.

    Args:
        device: where the probabilities live; its global generator is used when `generator` is None.
        generator: a generator to use instead of the global one; used by one request at a time.
        draws_ahead: draw all rows of a walk before looking at any; None: where it saves waiting.
    """

    def __init__(
        self, device: torch.device, generator: torch.Generator | None = None, draws_ahead: bool | None = None
    ) -> None:
        self._device = device
        self._generator = generator
        if draws_ahead is None:
            draws_ahead = device.type != "cpu" and race_is_multinomial(device.type)
        self._draws_ahead = draws_ahead
        self._marks: list[Tensor] = []  # the generator's state before each draw of the last walk, and after the last
        self._turns_of_others = 0

    def categorical(self, probs: Tensor) -> int:
        with self:
            return self._draw(probs[None])

    def category(self, probs: Tensor) -> Tensor:
        with self:
            return race(probs[None], self._generator)[0]

    def walk(self, probs: Tensor, expected: Sequence[int]) -> list[int]:
        with self:
            if len(probs) == 1 and not self._draws_ahead:  # there is nothing to go back to
                self._marks = []
                return [self._draw(probs)]
            self._marks = [self._state()]
            # noise that another thread draws meanwhile, unseen, must not be handed out again
            draws_ahead = self._draws_ahead and (self._generator is not None or _turns.is_alone())
            return self._look_later(probs, expected) if draws_ahead else self._look_at_each(probs, expected)

    def rewind(self, num_draws: int) -> None:
        if not self._marks:
            return
        with _turns.lock:
            is_mine = self._generator is not None or (_turns.is_alone() and _turns.of_others() == self._turns_of_others)
            if is_mine and torch.equal(self._state(), self._marks[-1]):
                self._set_state(self._marks[num_draws])

    def num_successes(self, probabilities: Tensor) -> Tensor:
        shape = probabilities.shape
        with self:
            draws = torch.rand(shape, dtype=torch.float64, device=probabilities.device, generator=self._generator)
        return (draws < probabilities).long().cumprod(dim=0).sum()

    def fork(self) -> TorchRandomness:
        copy = torch.Generator(device=self._device)
        with self:
            copy.set_state(self._state())
        return TorchRandomness(self._device, copy, self._draws_ahead)

    def __enter__(self) -> None:
        """A draw begins: with a global generator, one at a time."""
        if self._generator is None:
            _turns.lock.acquire()
            try:
                _turns.take()
                self._turns_of_others = _turns.of_others()
            except BaseException:  # Ctrl-C, too: others wait for the lock
                _turns.lock.release()
                raise

    def __exit__(self, *error: object) -> None:
        if self._generator is None:
            _turns.lock.release()

    def _draw(self, probs: Tensor) -> int:
        # [1, vocab_size], as in `generate`: the generator is then used in exactly the same way
        return int(torch.multinomial(probs, num_samples=1, generator=self._generator).item())

    def _look_at_each(self, probs: Tensor, expected: Sequence[int]) -> list[int]:
        tokens: list[int] = []
        for position in range(len(probs)):
            try:
                tokens.append(self._draw(probs[position : position + 1]))
            except RuntimeError:  # no distribution: plain decoding fails here, with the tokens before it said
                if not tokens:
                    raise
                break
            self._marks.append(self._state())
            if not _goes_on(tokens, expected):
                break
        return tokens

    def _look_later(self, probs: Tensor, expected: Sequence[int]) -> list[int]:
        draws, marks = [], self._marks
        for position in range(len(probs)):
            draws.append(race(probs[position : position + 1], self._generator))
            marks.append(self._state())
        # one transfer; a softmax that fails is nan throughout
        drawn, failed = torch.stack([torch.cat(draws), probs[:, 0].isnan().long()]).tolist()
        tokens: list[int] = []
        for token, is_failed in zip(drawn, failed, strict=True):
            if is_failed:
                break
            tokens.append(token)
            if not _goes_on(tokens, expected):
                break
        self._set_state(marks[len(tokens)])
        del marks[len(tokens) + 1 :]
        if not tokens:
            self._draw(probs[:1])  # raises what plain decoding raises
        return tokens

    def _state(self) -> Tensor:
        return _global_state(self._device) if self._generator is None else self._generator.get_state()

    def _set_state(self, state: Tensor) -> None:
        if self._generator is None:
            _set_global_state(self._device, state)
        else:
            self._generator.set_state(state)


@contextmanager
def spared(device: torch.device) -> Iterator[None]:
    """What draws from torch's global generators inside the block does not move the noise of requests.

    They are set back to where they were, unless another thread has drawn meanwhile: its noise is not handed out again.
    So the block sees noise that will be used: only for what may know it, such as decisions in paired sampling.

    Args:
        device: the target's; the CPU's generator is looked after as well.
    """
    devices = [torch.device("cpu"), *([device] if device.type != "cpu" else [])]
    with _turns.lock:
        turns = _turns.of_others()
        before = [_global_state(each) for each in devices]
    try:
        yield
    finally:
        with _turns.lock:
            if _turns.is_alone() and _turns.of_others() == turns:
                for each, state in zip(devices, before, strict=True):
                    _set_global_state(each, state)


@contextmanager
def plain_draws(generator: torch.Generator | None) -> Iterator[None]:
    """For code that draws from torch's global generator and takes no other: give it `generator` in its place.

    The global one is the same for all threads, so that only one such block runs at a time; afterwards it is as it was.
    None: it is used as it is.
    """
    with _one_at_a_time if generator is not None else nullcontext():
        with _turns.lock:
            _turns.take(plain=1)
            if generator is not None:
                before = _global_state(generator.device)
                _set_global_state(generator.device, generator.get_state())
        try:
            yield
        finally:
            with _turns.lock:
                _turns.take(plain=-1)
                if generator is not None:
                    after = _global_state(generator.device)
                    _set_global_state(generator.device, before)
                    generator.set_state(after)


def _global_state(device: torch.device) -> Tensor:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device.type).get_rng_state()  # type: ignore[no-any-return]


def _set_global_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    elif device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device.type).set_rng_state(state)


def race(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """One index a row by a race of exponentials, as `torch.multinomial` draws it, without its checks on the host.

    Args:
        probs: [n, vocab_size].

    Returns:
        [n], int64.
    """
    noise = torch.empty_like(probs).exponential_(1, generator=generator)
    return (probs / noise).argmax(dim=-1)


@cache
def race_is_multinomial(device_type: str) -> bool:
    """Does `race` give what `torch.multinomial` gives from the same noise? Tried: torch does not promise it."""
    device = torch.device(device_type)
    ours, torchs = (torch.Generator(device).manual_seed(0) for _ in range(2))
    probs = torch.rand((1, 4099), device=device, generator=torch.Generator(device).manual_seed(1)).pow(8)
    return all(int(race(probs, ours)) == int(torch.multinomial(probs, 1, generator=torchs)) for _ in range(16))


def _goes_on(tokens: list[int], expected: Sequence[int]) -> bool:
    """Was the last draw the expected one?"""
    last = len(tokens) - 1
    return last < len(expected) and tokens[last] == expected[last]
