"""Seconds of the steps of an engine that is started for it, with the vLLM of this environment.

The engine runs in a process of its own (this module, as a program): whatever vLLM prints or breaks is kept apart.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import IO, Any

from autospec.errors import AutospecError, ConfigurationError
from autospec.integrations.vllm.steps import Measured, points_of
from autospec.types import Deployment

PROPOSER = "autospec.integrations.vllm.widths.Widths"
LONGEST = 8
"""Draft tokens of a request, at most."""
END_SECONDS = 60.0
"""For an engine that has done all to be gone; then it is ended."""
_PROMPT_TOKENS = 16
_SAID_LINES = 40

Say = Callable[[str], object]


def measure(
    model: str,
    sizes: Sequence[int],
    num_tokens: int,
    seconds: float,
    dtype: str,
    engine: Mapping[str, Any],
    say: Say,
    longest: int = LONGEST,
) -> Measured:
    """Start an engine, measure it with so many requests at once, ascending, until the time is over, and end it.

    Args:
        model: folder of the target.
        sizes: numbers of requests.
        num_tokens: of each answer.
        seconds: after which no larger number is begun, loading not counted.
        dtype: of the target, or `auto`.
        engine: further arguments of `vllm.LLM`.
        say: takes progress.
        longest: draft tokens of a request, at most.

    Raises:
        ConfigurationError: vLLM is not installed here.
        AutospecError: the engine failed.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:  # none, or a folder that happens to be called so
        raise ConfigurationError(
            "vLLM is not installed in this environment: run this where it is (docs/vllm.md), or name a running server"
        )
    with tempfile.TemporaryDirectory(prefix="autospec-") as folder:
        path = Path(folder) / "steps.jsonl"
        llm = {
            "max_model_len": 2 * (_PROMPT_TOKENS + num_tokens + longest),
            "max_num_seqs": max(sizes),
            "seed": 0,
            **engine,
            "model": model,
            "dtype": dtype,
            "speculative_config": {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": longest},
            "additional_config": {"autospec_steps": str(path)},
        }
        job = {"llm": llm, "sizes": list(sizes), "num_tokens": num_tokens, "seconds": seconds}
        say(f"starting vLLM with {model}; it is given {sum(sizes)} requests of {num_tokens} tokens, nothing is sent")
        _run(job, say)
        return _read(path)


def _run(job: Mapping[str, Any], say: Say) -> None:
    command = [sys.executable, "-m", "autospec.integrations.vllm.own_engine"]
    said: deque[str] = deque(maxlen=_SAID_LINES)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment()
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        listener = Thread(target=_listen, args=(process.stderr, said), daemon=True)
        listener.start()
        try:
            json.dump(job, process.stdin)
            process.stdin.close()
            for line in process.stdout:
                say(line.rstrip("\n"))
        except BrokenPipeError:  # it ended before it had read what to do; it says why
            pass
        finally:
            code = _end(process)
            listener.join(5.0)
    if code:
        raise AutospecError(f"the engine ended with code {code}: {_reason(said)}")


def _end(process: subprocess.Popen[str]) -> int:
    """Its exit code; 0 where it had done all and did not go."""
    is_done = sys.exc_info()[0] is None
    try:
        return process.wait(END_SECONDS if is_done else 1.0)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
        return 0


def _environment() -> dict[str, str]:
    """With this autospec to be imported, in vLLM's own processes, too."""
    root = str(Path(__file__).parents[3])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _listen(stream: IO[str] | None, said: deque[str]) -> None:
    for line in stream or ():
        if line.strip():
            said.append(line.strip())


def _reason(said: Sequence[str]) -> str:
    """The last line that names an error, of the last that the engine said."""
    errors = [line for line in said if "Error" in line and "Traceback" not in line]
    return (errors or list(said) or ["it said nothing"])[-1][-400:]


def _read(path: Path) -> Measured:
    try:
        first, *rest = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        place = first["deployment"]
        steps = [(int(each["tokens"]), float(each["seconds"])) for each in rest]
    except (OSError, ValueError, KeyError) as error:
        raise AutospecError(f"the engine has written no steps: {type(error).__name__}: {error}") from error
    points = points_of(steps)
    if len(points) < 2:
        raise AutospecError(f"{len(steps)} steps of the engine are too few to know what they cost; nothing is written")
    return Measured(Deployment(**{**place, "drafts": tuple(place["drafts"])}), points)


def main() -> None:
    """The engine's process: reads the job from stdin, says on stdout how far it is."""
    job = json.load(sys.stdin)
    progress = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # whatever vLLM prints
    from vllm import LLM, SamplingParams

    llm = LLM(**job["llm"])
    vocab_size = int(llm.get_tokenizer().vocab_size)

    def answer(size: int, num_tokens: int) -> None:
        prompts = [
            {"prompt_token_ids": [(31 * number + 7 * place) % (vocab_size - 1) + 1 for place in range(_PROMPT_TOKENS)]}
            for number in range(size)
        ]
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        llm.generate(prompts, sampling, use_tqdm=False)

    answer(1, min(_PROMPT_TOKENS, job["num_tokens"]))  # whatever is compiled or captured at first
    end = time.monotonic() + job["seconds"]
    for number, size in enumerate(job["sizes"]):
        if number and time.monotonic() > end:
            progress.write(f"{job['seconds']:g} s are over (--seconds)\n")
            break
        began = time.monotonic()
        answer(size, job["num_tokens"])
        progress.write(f"{size} requests: {time.monotonic() - began:.1f} s\n")
    progress.close()


if __name__ == "__main__":
    main()
