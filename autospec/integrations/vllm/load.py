"""Seconds of the steps of a running vLLM server: a small load of known size, timed as it streams back.

With n requests that are all being decoded, a step verifies one token of each, and their drafts if the server drafts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from autospec.deployment import package_version
from autospec.errors import AutospecError
from autospec.integrations.vllm import web
from autospec.integrations.vllm.exposition import COUNTS, RUNNING, samples_in
from autospec.integrations.vllm.steps import LEAST_STEPS, Measured, StepPoint, points_of
from autospec.types import Deployment

STREAM_SECONDS = 120.0
"""Between two parts of an answer, at most."""
SETTLE_SECONDS = 3.0
"""For the counters to hold what has been answered."""
WARM_UP_TOKENS = 16
MOST_FOREIGN = 0.02
"""Of the tokens generated meanwhile, others' share beyond which steps were not this load's alone."""
LEAST_PARTS = 0.9
"""Parts of an answer to its steps: fewer are several steps in one."""

Say = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Model:
    """As the server names it."""

    name: str
    root: str  # where its weights are from
    max_model_len: int | None


@dataclass(slots=True)
class Answer:
    times: list[float] = field(default_factory=list)  # at which its parts came
    tokens: int = 0


class Server:
    """A running OpenAI server of vLLM.

    Args:
        address: as in `http://127.0.0.1:8000`.
        timeout: seconds for answers that are not generated.
        key: that it asks for, if any.

    Raises:
        ConfigurationError: the address is none.
    """

    def __init__(self, address: str, timeout: float = 10.0, key: str | None = None) -> None:
        self.address = web.checked(address)
        self._timeout, self._key = timeout, key

    def model(self, wanted: str | None) -> Model:
        """The one of this name; the only one if none is wanted. Raises: AutospecError: there is no such."""
        found = web.read_json(f"{self.address}/v1/models", self._timeout, key=self._key)
        listed = found.get("data") if isinstance(found, dict) else None
        if not isinstance(listed, list) or not all(isinstance(each, dict) and each.get("id") for each in listed):
            raise AutospecError(f"{self.address}/v1/models lists no models: is that vLLM's OpenAI server?")
        names = [str(each["id"]) for each in listed]
        if wanted is None and len(names) != 1:
            raise AutospecError(f"{self.address} serves {', '.join(names) or 'nothing'}: name one with --target")
        if wanted is not None and wanted not in names:
            raise AutospecError(f"{self.address} serves no {wanted!r}, but {', '.join(names) or 'nothing'} (--target)")
        each = listed[names.index(wanted) if wanted is not None else 0]
        length = each.get("max_model_len")
        return Model(str(each["id"]), str(each.get("root") or each["id"]), length if type(length) is int else None)

    def version(self) -> str:
        try:
            return str(web.read_json(f"{self.address}/version", self._timeout, key=self._key)["version"])
        except (AutospecError, KeyError, TypeError):  # not every server says
            return "unknown"

    def counts(self) -> dict[str, float]:
        """What it has counted, and `running`, the requests that it is at. Raises: AutospecError: it does not say."""
        address = f"{self.address}/metrics"
        text = web.read(address, self._timeout, key=self._key).decode("utf-8", "replace")
        fields = {name: called for called, name in COUNTS.items()} | {RUNNING: "running"}
        found: dict[str, float] = {}
        engines = set()
        for sample in samples_in(text):
            if (called := fields.get(sample.name)) is not None:
                found[called] = found.get(called, 0.0) + sample.value
                engines.add(sample.labels.get("engine", "0"))
        if "output_tokens" not in found:
            raise AutospecError(f"{address} has no {COUNTS['output_tokens']}: is that a vLLM server?")
        if len(engines) > 1:
            raise AutospecError(f"{self.address} has {len(engines)} engines: calibrate one that serves alone")
        return found

    def ask(self, model: Model, number: int, num_tokens: int) -> Answer:
        """One request, answered to its full length. Raises: AutospecError: it fails."""
        body = {
            "model": model.name,
            "prompt": f"{number}. Write down whatever comes to mind, and go on until you are told to stop.",
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer, address = Answer(), f"{self.address}/v1/completions"
        with web.posted(address, body, STREAM_SECONDS, key=self._key) as lines:
            while line := lines.readline(1 << 20):
                now = time.monotonic()
                part = _part(line, address)
                if part.get("choices"):
                    answer.times.append(now)
                if usage := part.get("usage"):
                    answer.tokens = int(usage["completion_tokens"])
        if not answer.tokens:
            raise AutospecError(f"{address} broke off, or does not say how many tokens it gave (stream_options)")
        return answer


def measure(
    server: Server,
    model: Model,
    sizes: Sequence[int],
    num_tokens: int,
    seconds: float,
    device: str,
    dtype: str,
    say: Say,
) -> Measured:
    """Measure a server with so many requests at once, ascending, until the time is over.

    Args:
        server: serves nobody else meanwhile.
        model: of it.
        sizes: numbers of requests.
        num_tokens: of each answer.
        seconds: after which no larger number is begun.
        device: that it runs on, as an engine with the proposer calls it without `vllm:`.
        dtype: the same.
        say: takes progress.

    Raises:
        AutospecError: it cannot be reached, serves others, or answers in another way.
    """
    if running := server.counts().get("running"):
        raise AutospecError(f"{server.address} is at {running:.0f} requests of others: calibrate while it is idle")
    if model.max_model_len is not None:
        num_tokens = min(num_tokens, model.max_model_len // 2)
    total = sum(sizes)
    say(
        f"{server.address} gets {total} requests of {num_tokens} tokens each, at most {max(sizes)} at once: "
        f"{total * num_tokens} tokens, no larger batches after {seconds:g} s"
    )
    server.ask(model, 0, min(WARM_UP_TOKENS, num_tokens))
    end = time.monotonic() + seconds
    points: list[StepPoint] = []
    for size in sizes:
        if len(points) > 1 and time.monotonic() > end:
            say(f"{seconds:g} s are over (--seconds)")
            break
        found = _measure_size(server, model, size, num_tokens)
        if isinstance(found, str):
            say(f"{size} requests: {found}")
            continue
        points.append(found)
        say(f"{size} requests: {1000 * found.seconds:.4g} ms a step over {found.tokens} tokens")
    if len({point.tokens for point in points}) < 2:
        raise AutospecError(f"{server.address}: fewer than two batch sizes could be measured; nothing is written")
    deployment = Deployment(
        host=server.address.split("//", 1)[1],
        device=f"vllm: {device}",
        target=model.root.rstrip("/").rpartition("/")[2] if model.root.startswith("/") else model.root,
        dtype=dtype,
        drafts=(),
        versions={"autospec": package_version(), "vllm": server.version()},
    )
    return Measured(deployment, tuple({point.tokens: point for point in points}.values()))


def _measure_size(server: Server, model: Model, size: int, num_tokens: int) -> StepPoint | str:
    """What steps with so many requests cost, or why that is not known."""
    before = server.counts()
    with ThreadPoolExecutor(size) as threads:
        answers = list(threads.map(lambda number: server.ask(model, number, num_tokens), range(size)))
    ours = sum(answer.tokens for answer in answers)
    after = _settled(server, before["output_tokens"] + ours)
    gained = {name: after[name] - before.get(name, 0.0) for name in after}
    if (foreign := gained["output_tokens"] - ours) > MOST_FOREIGN * ours:
        return f"left out, since {foreign:.0f} tokens were generated for others meanwhile"
    steps = ours - size - gained.get("num_accepted_tokens", 0.0)  # the first token of each comes with its prompt
    if sum(len(answer.times) for answer in answers) < LEAST_PARTS * (steps + size):
        raise AutospecError(f"{server.address} sends several tokens at a time: start vLLM with --stream-interval 1")
    gaps = steady_gaps([answer.times for answer in answers])
    drafted = gained.get("num_draft_tokens", 0.0) / steps if steps > 0 else 0.0
    tokens = round(size * (1.0 + drafted))
    found = points_of((tokens, gap) for gap in gaps)
    if len(gaps) < LEAST_STEPS * size or not found:
        return "left out, since they were not decoded at once (vllm serve --max-num-seqs)"
    return StepPoint(tokens, found[0].seconds, len(gaps) // size)


def steady_gaps(times: Sequence[Sequence[float]]) -> list[float]:
    """Seconds between parts of each answer while all of them were being decoded. Args: times: of each, ascending."""
    if not all(times):
        return []
    first, last = max(each[0] for each in times), min(each[-1] for each in times)
    return [now - then for each in times for then, now in pairwise(each) if then >= first and now <= last]


def _settled(server: Server, output_tokens: float) -> dict[str, float]:
    """Counts, as soon as they hold so many tokens."""
    end = time.monotonic() + SETTLE_SECONDS
    while True:
        found = server.counts()
        if found["output_tokens"] >= output_tokens or time.monotonic() > end:
            return found
        time.sleep(0.05)


def _part(line: bytes, address: str) -> dict[str, Any]:
    """A part of a streamed answer; nothing in lines that hold none."""
    data = line.removeprefix(b"data:").strip()
    if not line.startswith(b"data:") or data == b"[DONE]":
        return {}
    try:
        part = json.loads(data)
    except ValueError as error:
        raise AutospecError(f"{address} streams what is no JSON: {data[:80]!r}") from error
    if not isinstance(part, dict) or "error" in part:
        said = part.get("error") if isinstance(part, dict) else part
        raise AutospecError(f"{address}: {str(said)[:300]}")
    return part
