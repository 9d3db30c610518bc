"""Is `off` free? The model's own `generate` beside the wrapped one that never drafts, call by call.

    python experiments/21_off_is_free/run.py [--subjects tiny,bfloat16,float32] [--seconds 60] [--out DIR]

Each arm is a shallow copy of one model, so that all have the same weights and stay wrapped throughout: `generate`
itself, `off`, `off` with telemetry into a database, and `off` with automatic segments. They take turns, in an order
that turns, for so many seconds a cell. Reported is the ratio of medians, `generate` over wrapped (above 1: the wrapped
call is faster), with the interval of resampled rounds. Both sides must say the same tokens. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent / "20_profile"))
sys.path.insert(1, str(Path(__file__).parent.parent))

from common import DECODINGS
from subjects import NAMES, Subject, subject
from tqdm import tqdm

import autospec
from autospec.deployment import device_name

FOLDER = Path(__file__).parent
PROMPTS = (30, 1000)
NEW_TOKENS = (1, 16, 64, 256)
GENERATE = "generate"
BAR = 1.0
LEAST_ROUNDS, MOST_ROUNDS, WARM_ROUNDS = 5, 200, 2
RESAMPLES = 2_000


@dataclass(frozen=True)
class Row:
    """One arm in one cell. The ratio is that of medians, `generate` over this arm."""

    subject: str
    decoding: str
    prompt_tokens: int
    new_tokens: int
    arm: str
    rounds: int
    generate_ms: float
    wrapped_ms: float
    ratio: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """On the bar of 1: `met` or `missed` where ratio and interval agree, else `undecided`."""
        if min(self.ratio, self.low) >= BAR:
            return "met"
        return "missed" if max(self.ratio, self.high) < BAR else "undecided"


SETTINGS: dict[str, dict[str, Any]] = {
    "off": {},
    "off, store": {"store": "sqlite:///{folder}/off.db"},
    "off, segments": {"segments": "auto"},
}
"""Arms besides `generate`, as `wrap` is told."""


@contextmanager
def arms(each: Subject, folder: str, wanted: Sequence[str]) -> Iterator[dict[str, Callable[..., Any]]]:
    """What is called for an answer, by arm."""
    with ExitStack() as stack:
        found = {GENERATE: copy.copy(each.model).generate}
        for name in wanted:
            options = {key: value.format(folder=folder) for key, value in SETTINGS[name].items()}
            model = copy.copy(each.model)
            stack.enter_context(
                autospec.wrap(model, tokenizer=each.tokenizer, policy="off", backend="eager", **options)
            )
            found[name] = model.generate
        yield found


def seconds_of(
    generate: Callable[..., Any], prompt: Any, options: dict[str, Any], seed: int
) -> tuple[float, list[int]]:
    torch.manual_seed(seed)
    started = time.perf_counter()
    output = generate(prompt, **options)
    seconds = time.perf_counter() - started
    return seconds, output[0, prompt.shape[1] :].tolist()


def measure(
    each: Subject,
    calls: dict[str, Callable[..., Any]],
    decoding: str,
    prompt_tokens: int,
    new_tokens: int,
    seconds: float,
) -> Iterator[Row]:
    """All arms of one cell, round by round."""
    prompt = each.prompt(prompt_tokens)
    options = {**DECODINGS[decoding], "max_new_tokens": new_tokens}
    names, taken = list(calls), {name: list[float]() for name in calls}
    end = time.perf_counter() + seconds
    number = 0
    while number < WARM_ROUNDS + LEAST_ROUNDS or (time.perf_counter() < end and number < MOST_ROUNDS):
        turn = number % len(names)
        order = names[turn:] + names[:turn]
        said = {}
        for name in order if number // len(names) % 2 == 0 else order[::-1]:
            wall, said[name] = seconds_of(calls[name], prompt, options, number)
            if number >= WARM_ROUNDS:
                taken[name].append(wall)
        if any(tokens != said[GENERATE] for tokens in said.values()):
            raise RuntimeError(f"{each.name}, {decoding}: not the tokens of generate")
        number += 1
    rng = np.random.default_rng(0)
    plain = np.array(taken[GENERATE])
    picks = rng.integers(0, len(plain), (RESAMPLES, len(plain)))
    for name in names[1:]:
        wrapped = np.array(taken[name])
        drawn = np.median(plain[picks], axis=1) / np.median(wrapped[picks], axis=1)
        low, high = np.quantile(drawn, [0.025, 0.975])
        medians = 1e3 * statistics.median(taken[GENERATE]), 1e3 * statistics.median(taken[name])
        yield Row(
            each.name,
            decoding,
            prompt_tokens,
            new_tokens,
            name,
            len(plain),
            *medians,
            ratio=medians[0] / medians[1],
            low=float(low),
            high=float(high),
        )


def show(row: Row) -> None:
    cells = f"{row.subject:10}{row.decoding:9}{row.prompt_tokens:>7}{row.new_tokens:>6}  {row.arm:15}{row.rounds:>6}"
    times = f"{row.generate_ms:>12.2f}{row.wrapped_ms:>12.2f}{row.ratio:>8.3f}   {row.low:.3f} to {row.high:.3f}"
    tqdm.write(f"{cells}{times}   {row.verdict}")


def _with_kept(rows: list[Row], path: Path) -> list[Row]:
    """With those of cells that were measured before, and not now."""
    if not path.is_file():
        return rows
    measured = {(row.subject, row.prompt_tokens, row.new_tokens) for row in rows}
    before = json.loads(path.read_text(encoding="utf-8"))["rows"]
    known = [Row(**{name: value for name, value in each.items() if name != "verdict"}) for each in before]
    kept = [row for row in known if (row.subject, row.prompt_tokens, row.new_tokens) not in measured]
    return sorted([*kept, *rows], key=lambda row: (NAMES.index(row.subject), row.decoding, row.prompt_tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subjects", default=",".join(NAMES), help="separated by commas")
    parser.add_argument("--prompts", default=",".join(map(str, PROMPTS)), help="prompt tokens, separated by commas")
    parser.add_argument("--tokens", default=",".join(map(str, NEW_TOKENS)), help="new tokens, separated by commas")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a cell, at least five rounds")
    parser.add_argument("--arms", default="", help=f"only these, separated by semicolons: {'; '.join(SETTINGS)}")
    parser.add_argument("--keep", action="store_true", help="keep other cells that results.json in --out has")
    parser.add_argument("--smoke", action="store_true", help="say in the results that they are a trial of the script")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    names = options.subjects.split(",")
    wanted = options.arms.split(";") if options.arms else list(SETTINGS)
    if unknown := set(wanted) - set(SETTINGS):
        parser.error(f"--arms {unknown.pop()!r}: there are {', '.join(SETTINGS)}")
    prompts, tokens = ([int(each) for each in given.split(",")] for given in (options.prompts, options.tokens))
    rows: list[Row] = []
    head = f"{'model':10}{'':9}{'prompt':>7}{'new':>6}  {'arm':15}{'rounds':>6}{'generate ms':>12}{'wrapped ms':>12}"
    print(f"{head}{'ratio':>8}   95 %")
    with tempfile.TemporaryDirectory() as folder:
        cells = [(d, p, n) for d in DECODINGS for p in prompts for n in tokens]
        for name in names:
            each = subject(name)
            with arms(each, folder, wanted) as calls:
                for decoding, prompt_tokens, new_tokens in tqdm(cells, desc=name):
                    for row in measure(each, calls, decoding, prompt_tokens, new_tokens, options.seconds):
                        rows.append(row)
                        show(row)
    verdicts = Counter(row.verdict for row in rows)
    print(f"not slower than generate: {dict(verdicts)} of {len(rows)}")
    rows = _with_kept(rows, options.out / "results.json") if options.keep else rows
    verdicts = Counter(row.verdict for row in rows)
    written = {
        "is_smoke_run": options.smoke,
        "device": device_name(torch.device("cpu")),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seconds_of_a_cell": options.seconds,
        "bar": BAR,
        "verdicts": dict(verdicts),
        "rows": [{**asdict(row), "verdict": row.verdict} for row in rows],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
