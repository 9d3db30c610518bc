"""The small things done in every block, each beside a floor: the least that anything doing the same must do.

    python experiments/22_micro/run.py [--repeats 41] [--only verification,ngram,suffix,choice,recorder] [--out DIR]

Both sides take turns within one run, on the same inputs; medians in microseconds of one call, their ratio with the
interval of resampled neighbours. Why each floor is one is said in README.md. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import queue
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
import transformers
from common import script
from tqdm import tqdm

from autospec.deployment import device_name
from autospec.drafts import NGram, Suffix
from autospec.drafts.base import DraftRequest
from autospec.policies import Goodput, Guard
from autospec.randomness import TorchRandomness
from autospec.telemetry import Recorder
from autospec.types import PhaseSeconds, RequestRecord

FOLDER = Path(__file__).parent
BAR = 2.0
BLOCK_LENGTH = 8
VOCABULARY = 49_152
WEIGHT_BYTES = 269_000_000
"""Of SmolLM2-135M in bfloat16: what a forward reads, and the caches then hold."""
RESAMPLES = 2_000

Timed = Callable[[], float]
"""Seconds of one call."""


@dataclass(frozen=True)
class Row:
    """Medians in microseconds, and the ratio ours / floor with its 95 % interval."""

    name: str
    case: str
    ours_us: float
    floor_us: float
    ratio: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """On the bar: `met` or `missed` where ratio and interval agree, else `undecided`."""
        if max(self.ratio, self.high) <= BAR:
            return "met"
        return "missed" if min(self.ratio, self.low) > BAR else "undecided"


def compared(name: str, case: str, ours: Timed, floor: Timed, repeats: int) -> Row:
    """Both in turn. The first calls are not counted."""
    seconds: tuple[list[float], list[float]] = ([], [])
    gc.collect()
    gc.disable()  # it would be charged to whoever happens to make the next object
    try:
        for repeat in range(repeats + 3):
            sides = [(0, ours), (1, floor)]
            for index, call in sides if repeat % 2 else reversed(sides):
                taken = call()
                if repeat >= 3:
                    seconds[index].append(taken)
    finally:
        gc.enable()
    mine, least = np.array(seconds[0]), np.array(seconds[1])
    picks = np.random.default_rng(0).integers(0, repeats, (RESAMPLES, repeats))
    drawn = np.median(mine[picks], axis=1) / np.median(least[picks], axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    medians = statistics.median(seconds[0]), statistics.median(seconds[1])
    return Row(name, case, 1e6 * medians[0], 1e6 * medians[1], medians[0] / medians[1], float(low), float(high))


def seconds_of(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def verification(repeats: int) -> Iterator[Row]:
    """From a block's logits to committed tokens; floor: the operators over the vocabulary alone."""
    blocks = script("07_verification")
    kinds = (
        blocks.Kind("greedy", do_sample=False, sampling="paired", is_drawn=False),
        blocks.Kind("sampled, one-hot drafts", do_sample=True, sampling="paired", is_drawn=False),
        blocks.Kind("sampled, drawn drafts", do_sample=True, sampling="maximal", is_drawn=True),
    )
    for kind in kinds:
        for block_length in (1, 4, 8, 16):
            for accepted in ("none", "all"):
                block = blocks.make_block(kind, VOCABULARY, block_length, accepted, torch.device("cpu"))
                logits, rows = block.logits, block_length + 1 if accepted == "all" else 1

                def chosen(logits: Any = logits, rows: int = rows, kind: Any = kind) -> Any:
                    scores = logits.to(torch.float32)  # the format in which `generate` chooses
                    if not kind.do_sample:
                        return scores.argmax(dim=-1).tolist()
                    probs = scores.softmax(dim=-1)
                    return torch.multinomial(probs[:1] if kind.is_drawn else probs[:rows], 1).tolist()

                def ours(kind: Any = kind, block: Any = block) -> float:
                    return seconds_of(blocks.ours(kind, block))

                case = f"{kind.name}, k = {block_length}, {accepted} accepted"
                yield compared("verification", case, ours, lambda chosen=chosen: seconds_of(chosen), repeats)


def text(num_tokens: int) -> list[int]:
    """Phrases that come again, in an order that does not."""
    rng = np.random.default_rng(0)
    phrases = [rng.integers(0, VOCABULARY, int(rng.integers(2, 9))).tolist() for _ in range(120)]
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        tokens += phrases[int(rng.integers(len(phrases)))]
    return tokens[:num_tokens]


def draft_request() -> DraftRequest:
    cpu = torch.device("cpu")
    return DraftRequest(
        cpu, VOCABULARY, False, transformers.LogitsProcessorList(), TorchRandomness(cpu), torch.float32, is_paired=True
    )


PROMPT_TOKENS, ANSWER_TOKENS, COMMITTED = 1000, 600, 2


def along(propose: Callable[[list[int]], Any], tokens: Sequence[int]) -> float:
    """Seconds of one proposal, asked for in every block of an answer. The prompt is read before."""
    committed = list(tokens[:PROMPT_TOKENS])
    propose(committed)
    started, blocks = time.perf_counter(), 0
    for start in range(PROMPT_TOKENS, len(tokens), COMMITTED):
        committed += tokens[start : start + COMMITTED]
        propose(committed)
        blocks += 1
    return (time.perf_counter() - started) / blocks


def bare_ngram() -> Callable[[list[int]], list[int]]:
    """Each n-gram in a dictionary, one probe a size, one slice."""
    index: dict[tuple[int, ...], int] = {}
    indexed = 0

    def propose(committed: list[int]) -> list[int]:
        nonlocal indexed
        length = len(committed)
        for end in range(indexed + 1, length):
            for size in (3, 2, 1):
                if end >= size:
                    index[tuple(committed[end - size : end])] = end
        indexed = length - 1
        for size in (3, 2, 1):
            start = index.get(tuple(committed[-size:]))
            if start is not None:
                return committed[start : start + BLOCK_LENGTH]
        return []

    return propose


def bare_counting_ngram() -> Callable[[list[int]], list[int]]:
    """The same, with how often each token followed."""
    counts: dict[tuple[int, ...], int] = {}
    best: dict[tuple[int, ...], int] = {}
    ends: dict[tuple[int, ...], int] = {}
    indexed = 0

    def propose(committed: list[int]) -> list[int]:
        nonlocal indexed
        length = len(committed)
        for end in range(indexed + 1, length):
            for size in (3, 2, 1):
                if end >= size:
                    followed = tuple(committed[end - size : end + 1])
                    counts[followed] = count = counts.get(followed, 0) + 1
                    ngram = followed[:-1]
                    if count > best.get(ngram, 0):
                        best[ngram], ends[ngram] = count, end
        indexed = length - 1
        for size in (3, 2, 1):
            start = ends.get(tuple(committed[-size:]))
            if start is not None:
                return committed[start : start + BLOCK_LENGTH]
        return []

    return propose


def bare_suffix() -> Callable[[list[int]], list[int]]:
    """The automaton's construction in one loop, and the first continuation of the longest match: nothing is counted."""
    following: list[dict[int, int]] = [{}]
    link, length = [-1], [0]
    newest, read = 0, 0

    def propose(committed: list[int]) -> list[int]:
        nonlocal newest, read
        for position in range(read, len(committed)):
            token = committed[position]
            made = len(link)
            following.append({})
            length.append(length[newest] + 1)
            link.append(0)
            state = newest
            while state >= 0 and token not in following[state]:
                following[state][token] = made
                state = link[state]
            if state >= 0:
                target = following[state][token]
                if length[target] != length[state] + 1:
                    split = len(link)
                    following.append(dict(following[target]))
                    length.append(length[state] + 1)
                    link.append(link[target])
                    link[target] = split
                    while state >= 0 and following[state].get(token) == target:
                        following[state][token] = split
                        state = link[state]
                    target = split
                link[made] = target
            newest = made
        read = len(committed)
        state, tokens = link[newest], []
        while state > 0 and following[state] and len(tokens) < BLOCK_LENGTH:
            token, state = next(iter(following[state].items()))
            tokens.append(token)
        return tokens

    return propose


def ngram(repeats: int) -> Iterator[Row]:
    tokens = text(PROMPT_TOKENS + ANSWER_TOKENS)
    for continuation in ("newest", "frequent"):

        def ours(continuation: str = continuation) -> float:
            session = NGram(continuation=continuation).start(draft_request())
            return along(lambda committed: session.propose(committed, BLOCK_LENGTH), tokens)

        bare = bare_ngram if continuation == "newest" else bare_counting_ngram
        yield compared("ngram", continuation, ours, lambda bare=bare: along(bare(), tokens), repeats)


def suffix(repeats: int) -> Iterator[Row]:
    tokens = text(PROMPT_TOKENS + ANSWER_TOKENS)

    def ours() -> float:
        session = Suffix(learns=False).start(draft_request())
        return along(lambda committed: session.propose(committed, BLOCK_LENGTH), tokens)

    yield compared("suffix", "this request alone", ours, lambda: along(bare_suffix(), tokens), repeats)


def bare_choice(segments: int, num_sources: int, num_offers: int, lengths: Sequence[int]) -> Callable[[int], int]:
    """Arrays alone: from counts of a segment to the acceptance of each position, to the tokens expected of each action.

    What offers are like moves the odds of theirs. Nothing is remembered or said, and nobody counts blocks or budgets.
    """
    rng = np.random.default_rng(0)
    positions = max(lengths)
    accepted = rng.uniform(0.0, 4.0, (segments, num_sources, positions))
    rejected = rng.uniform(0.0, 4.0, (segments, num_sources, positions))
    moves = rng.uniform(-1.0, 1.0, (num_offers, positions))
    seconds = rng.uniform(1.0, 4.0, (num_sources, len(lengths)))
    places = np.array(lengths) - 1

    def choose(segment: int) -> int:
        odds = (accepted[segment] + 2.0) / (rejected[segment] + 2.0)
        odds[:num_offers] *= np.exp(moves)
        survival = (odds / (odds + 1.0)).cumprod(axis=1)
        tokens = survival.cumsum(axis=1).take(places, axis=1) + 1.0
        return int((tokens / seconds).argmax())

    return choose


def choice(repeats: int, segments: int) -> Iterator[Row]:
    """Of 60 actions; floors: the best of goodputs that are there already, and with reckoning them from the counts."""
    choosing = script("16_choosing")
    traffic = choosing.Traffic(segments, seed=0)
    costs = choosing.Costs()
    tokens, seconds = np.random.default_rng(0).uniform(1.0, 4.0, (2, len(choosing.SOURCES) * len(choosing.LENGTHS)))
    weights = torch.zeros(WEIGHT_BYTES // 4)
    bare = bare_choice(segments, len(choosing.SOURCES), len(choosing.RETRIEVAL), choosing.LENGTHS)
    makes = {"auto": lambda: Guard(Goodput(costs), costs, name="auto"), "goodput": lambda: Goodput(costs)}
    for name, make in makes.items():
        policy = make()
        for number in range(segments):
            learn(policy, traffic, number)
        rng = np.random.default_rng(1)

        def ours(before: Callable[[], Any], policy: Any = policy, rng: Any = rng) -> float:
            number, taken = int(rng.integers(segments)), []
            for block in range(choosing.BLOCKS):
                context, right = traffic.block(number, 1 + 3 * block)
                before()
                started = time.perf_counter()
                action = policy.choose(context)
                taken.append(time.perf_counter() - started)
                policy.observe(traffic.outcome(context, action, right))
            return statistics.median(taken)

        def argmax() -> float:
            return statistics.median(seconds_of(lambda: int((tokens / seconds).argmax())) for _ in range(12))

        def reckoned(before: Callable[[], Any], rng: Any = rng) -> float:
            number, taken = int(rng.integers(segments)), []
            for _ in range(choosing.BLOCKS):
                before()
                taken.append(seconds_of(lambda: bare(number)))
            return statistics.median(taken)

        at_once, case = partial(ours, lambda: None), f"{name}, {segments} segments"
        yield compared("choice", f"{case}, over argmax", at_once, argmax, repeats)
        yield compared("choice", f"{case}, over numpy", at_once, partial(reckoned, lambda: None), repeats)
        sides = partial(ours, weights.sum), partial(reckoned, weights.sum)
        yield compared("choice", f"{case}, over numpy, after a forward", *sides, repeats)


def learn(policy: Any, traffic: Any, number: int) -> None:
    for block in range(12):
        context, right = traffic.block(number, 1 + 3 * block)
        policy.observe(traffic.outcome(context, policy.choose(context), right))


RECORDS = 50
"""In a row."""


def recorder(repeats: int) -> Iterator[Row]:
    """Handing over a record that is made already; floor: the standard library's bounded queue."""
    record = RequestRecord(
        "0" * 32, datetime.now(UTC), "default", "auto", False, False, "greedy", 100, 100, PhaseSeconds(1.0)
    )
    with tempfile.TemporaryDirectory() as folder, Recorder(f"sqlite:///{folder}/micro.db") as keeper:
        waiting: queue.Queue[RequestRecord] = queue.Queue(50_000)
        bare: deque[RequestRecord] = deque()
        number = 0

        def ours() -> float:
            nonlocal number
            records = [replace(record, request_id=f"{number + index:032x}") for index in range(RECORDS)]
            number += RECORDS
            started = time.perf_counter()
            for each in records:
                keeper.record(each)
            taken = (time.perf_counter() - started) / RECORDS
            keeper.flush()
            return taken

        def of(hand_over: Callable[[RequestRecord], Any]) -> float:
            started = time.perf_counter()
            for _ in range(RECORDS):
                hand_over(record)
            taken = (time.perf_counter() - started) / RECORDS
            waiting.queue.clear()
            bare.clear()
            return taken

        yield compared("recorder", "over queue.Queue", ours, lambda: of(waiting.put_nowait), repeats)
        yield compared("recorder", "over deque.append", ours, lambda: of(bare.append), repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--segments", type=int, default=10_000, help="that the policy knows")
    parser.add_argument("--only", default="verification,ngram,suffix,choice,recorder")
    parser.add_argument("--smoke", action="store_true", help="say in the results that they are a trial of the script")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    measured: dict[str, Callable[[], Iterator[Row]]] = {
        "verification": lambda: verification(options.repeats),
        "ngram": lambda: ngram(options.repeats),
        "suffix": lambda: suffix(options.repeats),
        "choice": lambda: choice(options.repeats, options.segments),
        "recorder": lambda: recorder(options.repeats),
    }
    rows: list[Row] = []
    with torch.inference_mode():
        for name in tqdm(options.only.split(",")):
            rows += measured[name]()
    print(f"{'':14}{'':44}{'ours us':>10}{'floor us':>10}{'ratio':>8}   95 %")
    for row in rows:
        cells = f"{row.name:14}{row.case:44}{row.ours_us:>10.1f}{row.floor_us:>10.1f}{row.ratio:>8.2f}"
        print(f"{cells}   {row.low:.2f} to {row.high:.2f}   {row.verdict}")
    written = {
        "is_smoke_run": options.smoke,
        "device": device_name(torch.device("cpu")),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "repeats": options.repeats,
        "segments": options.segments,
        "bar": BAR,
        "rows": [{**asdict(row), "verdict": row.verdict} for row in rows],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
