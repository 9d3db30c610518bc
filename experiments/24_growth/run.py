"""How time per token grows: with the answer, the context, the number of segments, and the number of draft sources.

    python experiments/24_growth/run.py [--longest-answer 4096] [--longest-context 8192] [--segments 10000] [--quick]

What autospec adds to a block (drafting, choosing tokens, the policy, all else on the host) is set beside one plain
forward of SmolLM2-135M at the same context. Answers up to thousands of tokens are made by a tiny model, whose own
forwards hide little. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent.parent))

from common import script
from laws import fit

import autospec
from autospec import models
from autospec.caches import CACHE_KEYWORD, append, decoding_cache, stop_recording
from autospec.deployment import device_name
from autospec.drafts import Assistant, Blend, EarlyExit, NGram, Suffix
from autospec.memory import held_bytes

FOLDER = Path(__file__).parent
VOCABULARY = 512
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0}
GREEDY = {"do_sample": False}
BLOCKS = 24
"""Tokens of an answer at each context."""
CHUNK = 1024
"""Tokens of a context that are read in one forward."""
PHASES = ("draft", "correction", "emission", "other")
QUICK = {"longest_answer": 512, "longest_context": 1024, "segments": 100, "choices": 600, "repeats": 1}


def tiny(seed: int = 0) -> Any:
    """Two narrow layers with room for long answers."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16_384,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def doubling(first: int, last: int) -> list[int]:
    """From `first`, each twice the one before, up to `last`."""
    found = [first]
    while found[-1] * 2 <= last:
        found.append(found[-1] * 2)
    return found


def answers(longest: int, repeats: int) -> dict[str, Any]:
    """Milliseconds a token in each doubling of the answer's length, tiny model; new text, where retrieval misses, and
    text that repeats itself, where it hits."""
    model = tiny()
    prompt = torch.randint(1, VOCABULARY, (1, 32), generator=torch.Generator().manual_seed(0))
    lengths = doubling(128, longest)
    found: dict[str, Any] = {"answer_tokens": lengths[1:]}
    for kind, decoding in {"new text": SAMPLED, "repeating text": GREEDY}.items():
        whole: dict[str, dict[int, list[float]]] = {}
        for repeat in tqdm(range(repeats), desc=f"answers, {kind}"):
            arms = ["generate", "off", "auto"]
            for length in lengths:
                for arm in arms if repeat % 2 == 0 else arms[::-1]:
                    seconds = _answer_seconds(model, arm, prompt, length, decoding)
                    whole.setdefault(arm, {}).setdefault(length, []).append(seconds)
        found[kind] = {
            arm: [
                1000 * (statistics.median(by_length[n]) - statistics.median(by_length[n // 2])) / (n - n // 2)
                for n in lengths[1:]
            ]
            for arm, by_length in whole.items()
        }
    return found


def _answer_seconds(model: Any, arm: str, prompt: torch.Tensor, length: int, decoding: dict[str, Any]) -> float:
    options = {"max_new_tokens": length, "attention_mask": torch.ones_like(prompt), **decoding}
    torch.manual_seed(0)
    if arm == "generate":
        started = time.perf_counter()
        model.generate(prompt, **options)
        return time.perf_counter() - started
    with autospec.wrap(model, drafts=[NGram(), Suffix()], policy=arm, control_share=0.0, backend="eager") as speculator:
        started = time.perf_counter()
        model.generate(prompt, **options)
        seconds = time.perf_counter() - started
        _by_blocks(speculator)
    return seconds


def _by_blocks(speculator: Any) -> Any:
    record = speculator.last_request
    if record is None or record.fallback_reason or record.notes:
        raise RuntimeError(f"not decoded by blocks, or not all of it: {record}")
    return record


def contexts(longest: int, repeats: int, dtype: str) -> dict[str, Any]:
    """Milliseconds at each context, SmolLM2-135M: a plain forward, `generate` and `off` for each token, and what
    `auto` adds to each block besides the target's forwards."""
    model, _ = models.load("smollm2-135m", dtype=dtype)
    assistant = models.load_model("smollm2-135m-assistant", dtype=dtype)
    window = model.config.max_position_embeddings - BLOCKS - 1
    lengths = [min(length, window) for length in doubling(256, longest)]
    found: dict[str, Any] = {"context_tokens": lengths, "forward": [], "generate": [], "off": []}
    found["auto"] = {phase: [] for phase in PHASES}
    text = torch.randint(1, model.config.vocab_size, (1, max(lengths)), generator=torch.Generator().manual_seed(0))
    wrapped = {policy: copy.copy(model) for policy in ("off", "auto")}
    speculators = {
        policy: autospec.wrap(
            each,
            drafts=[NGram(), Suffix(), Assistant(assistant), Blend(Assistant(assistant), Suffix())],
            policy=policy,
            control_share=0.0,
            backend="eager",
        )
        for policy, each in wrapped.items()
    }
    cache, held = decoding_cache(model), 0
    stop_recording(cache)
    for length in tqdm(lengths, desc="contexts"):
        with torch.no_grad():
            for start in range(held, length - 1, CHUNK):
                _, cache = append(model, text[:, start : min(start + CHUNK, length - 1)], cache)
        held = length - 1
        found["forward"].append(_forward_milliseconds(model, text[:, held : held + 1], cache, repeats))
        laps: dict[str, list[float]] = {"generate": [], "off": []}
        phases: dict[str, list[float]] = {phase: [] for phase in PHASES}
        for _ in range(repeats):
            for arm in ("generate", "off", "auto"):
                seconds = [_context_seconds(wrapped.get(arm, model), text[:, :length], cache, n) for n in (1, BLOCKS)]
                if arm != "auto":
                    laps[arm].append(1000 * (seconds[1] - seconds[0]) / (BLOCKS - 1))
                    continue
                record = _by_blocks(speculators[arm])
                for phase in PHASES:
                    phases[phase].append(1000 * getattr(record.seconds, phase) / record.blocks)
        for arm, values in laps.items():
            found[arm].append(statistics.median(values))
        for phase, values in phases.items():
            found["auto"][phase].append(statistics.median(values))
    for speculator in speculators.values():
        speculator.close()
    return found


def _forward_milliseconds(model: Any, token: torch.Tensor, cache: Any, repeats: int) -> float:
    own = copy.deepcopy(cache)
    laps = []
    with torch.no_grad():
        for _ in range(4 + 4 * repeats):
            started = time.perf_counter()
            _, own = append(model, token, own)
            laps.append(1000 * (time.perf_counter() - started))
    return statistics.median(laps[2:])


def _context_seconds(model: Any, prompt: torch.Tensor, cache: Any, tokens: int) -> float:
    """Of an answer after a context that is in the cache already."""
    own = {CACHE_KEYWORD: copy.deepcopy(cache)}
    torch.manual_seed(0)
    started = time.perf_counter()
    model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, **SAMPLED, **own)
    return time.perf_counter() - started


def segments(most: int, choices: int) -> dict[str, Any]:
    """Microseconds of choosing and learning in each block, and bytes held, `auto` with six sources."""
    choosing = script("16_choosing")
    counts = [n for n in (1, 10, 100, 1_000, 10_000) if n <= most]
    found: dict[str, Any] = {"segments": counts, "choose": [], "observe": [], "held_bytes": []}
    made: list[Any] = []
    make = choosing.policies()["auto"]

    def kept() -> Any:
        made.append(make())
        return made[-1]

    for count in counts:
        measured = choosing.measure(kept, count, choices, f"{count} segments")
        for key in ("choose", "observe"):
            found[key].append(measured[key]["median"])
        found["held_bytes"].append(held_bytes([made[-1]]))
    return found


def sources(repeats: int) -> dict[str, Any]:
    """Milliseconds of the host in each block under `auto` with one to six sources, tiny model."""
    model, small = tiny(), tiny(1)
    makers: list[Callable[[], Any]] = [
        NGram,
        Suffix,
        lambda: Assistant(small),
        lambda: Blend(Assistant(small), Suffix()),
        lambda: EarlyExit(1),
        lambda: _renamed(NGram()),
    ]
    prompt = torch.randint(1, VOCABULARY, (1, 64), generator=torch.Generator().manual_seed(1))
    found: dict[str, Any] = {"sources": [], "host": [], "plain step": []}
    for count in tqdm(range(1, len(makers) + 1), desc="sources"):
        hosts, steps = [], []
        for _ in range(repeats):
            drafts = [make() for make in makers[:count]]
            with autospec.wrap(model, drafts=drafts, policy="auto", control_share=0.0, backend="eager") as speculator:
                torch.manual_seed(0)
                model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=256, **SAMPLED)
                record = _by_blocks(speculator)
            hosts.append(1000 * sum(getattr(record.seconds, phase) for phase in PHASES) / record.blocks)
            steps.append(1000 * record.seconds.verify / record.blocks)
        found["sources"].append(count)
        found["host"].append(statistics.median(hosts))
        found["plain step"].append(statistics.median(steps))
    return found


def _renamed(source: Any) -> Any:
    source.name = "ngram_again"
    return source


def laws(found: dict[str, Any]) -> dict[str, Any]:
    """The law of each cost, and of what autospec adds beside the model's own forward."""
    context = found["contexts"]
    host = [sum(context["auto"][phase][i] for phase in PHASES) for i in range(len(context["context_tokens"]))]
    made = {
        "forward of SmolLM2, by context (ms)": fit(context["context_tokens"], context["forward"]),
        "generate, by context (ms a token)": fit(context["context_tokens"], context["generate"]),
        "off, by context (ms a token)": fit(context["context_tokens"], context["off"]),
        "auto without the target's forwards, by context (ms a block)": fit(context["context_tokens"], host),
    }
    answer = found["answers"]
    for kind in ("new text", "repeating text"):
        for arm, values in answer[kind].items():
            made[f"{arm}, tiny model, {kind}, by answer (ms a token)"] = fit(answer["answer_tokens"], values)
    segment = found["segments"]
    for key in ("choose", "observe"):
        made[f"auto: {key}, by segments (us a block)"] = fit(segment["segments"], segment[key])
    made["auto: held, by segments (bytes)"] = fit(segment["segments"], segment["held_bytes"])
    made["auto on the host, by sources (ms a block)"] = fit(found["sources"]["sources"], found["sources"]["host"])
    return made


def bars(found: dict[str, Any], fitted: dict[str, Any]) -> dict[str, bool]:
    """Nothing may add more from end to end than the model's own forward does from the shortest to the longest
    context, nor grow faster than it does with the answer."""
    own = fitted["forward of SmolLM2, by context (ms)"]["added"]
    added = fitted["auto without the target's forwards, by context (ms a block)"]["added"]
    made = {"auto adds no more with context than the forward": added <= own}
    for kind in ("new text", "repeating text"):
        plain, auto = (fitted[f"{arm}, tiny model, {kind}, by answer (ms a token)"] for arm in ("generate", "auto"))
        share = found["answers"]["answer_tokens"][-1] / found["contexts"]["context_tokens"][-1]
        made[f"auto adds no more with the answer than generate and a forward, {kind}"] = (
            auto["added"] <= max(plain["added"], 0.0) + own * share
        )
    step = found["contexts"]["forward"][0]
    for key in ("choose", "observe"):
        name = f"auto: {key}, by segments (us a block)"
        made[f"{key} with all segments stays below a hundredth of a forward"] = (
            found["segments"][key][-1] / 1000 <= 0.01 * step
        )
        made[f"{key} grows with segments no faster than their logarithm"] = fitted[name]["law"] in (
            "constant",
            "logarithm",
        )
    made["memory grows with segments no faster than linearly"] = fitted["auto: held, by segments (bytes)"]["law"] in (
        "constant",
        "logarithm",
        "linear",
    )
    made["the host's part grows with sources no faster than linearly"] = fitted[
        "auto on the host, by sources (ms a block)"
    ]["law"] in ("constant", "logarithm", "linear")
    return made


def charts(found: dict[str, Any]) -> str:
    """The curves, x doubling (times ten for segments, plus one for sources) from left to right."""
    context, answer, segment = found["contexts"], found["answers"], found["segments"]
    source = found["sources"]
    first, last = context["context_tokens"][0], context["context_tokens"][-1]

    def span(values: Sequence[float]) -> str:
        return f"{values[0]:,} to {values[-1]:,}"

    return script("13_policy_regret", "plot").lines(
        {
            f"ms, context {first:,} to {last:,}": {key: context[key] for key in ("forward", "generate", "off")},
            "auto adds, ms a block, same contexts": context["auto"],
            f"us a token, new text of {span(answer['answer_tokens'])}": {
                arm: [1000 * v for v in values] for arm, values in answer["new text"].items()
            },
            f"us a token, repeating, {span(answer['answer_tokens'])}": {
                arm: [1000 * v for v in values] for arm, values in answer["repeating text"].items()
            },
            f"us a block, segments {span(segment['segments'])}": {key: segment[key] for key in ("choose", "observe")},
            f"us a block, sources {span(source['sources'])}": {
                name: [1000 * v for v in source[key]] for name, key in (("auto", "host"), ("forward", "plain step"))
            },
        }
    )


def print_laws(fitted: dict[str, Any], met: dict[str, bool]) -> None:
    print("| cost | law | constant part | added from end to end |")
    print("|---|---|---|---|")
    for name, law in fitted.items():
        print(f"| {name} | {law['law']} | {law['a']:.4g} | {law['added']:.4g} |")
    print("\n| bar | |\n|---|---|")
    for name, is_met in met.items():
        print(f"| {name} | {'met' if is_met else 'missed'} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest-answer", type=int, default=4_096, help="tokens")
    parser.add_argument("--longest-context", type=int, default=8_192, help="tokens")
    parser.add_argument("--segments", type=int, default=10_000)
    parser.add_argument("--choices", type=int, default=6_000, help="that are timed for each number of segments")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument(
        "--quick", action="store_true", help="short answers, contexts and lists; a trial, as --smoke says"
    )
    parser.add_argument("--smoke", action="store_true", help="say in the results that they are a trial of the script")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for results.json and growth.svg")
    options = parser.parse_args()
    if options.quick:
        vars(options).update(QUICK, smoke=True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AUTOSPEC_COSTS"] = folder  # measured by this run, whatever the user's folder holds
        found = measured(options)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (options.out / "growth.svg").write_text(charts(found), encoding="utf-8")
    print_laws(found["laws"], found["bars"])
    return 0


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """What results.json holds."""
    started = time.monotonic()
    found: dict[str, Any] = {
        "is_smoke_run": options.smoke,
        "machine": device_name(torch.device("cpu")),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "options": {key: value for key, value in vars(options).items() if key not in ("out", "smoke")},
        "answers": answers(options.longest_answer, options.repeats),
        "contexts": contexts(options.longest_context, options.repeats, options.dtype),
        "segments": segments(options.segments, options.choices),
        "sources": sources(options.repeats),
    }
    found["laws"] = laws(found)
    found["bars"] = bars(found, found["laws"])
    found["minutes"] = round((time.monotonic() - started) / 60, 1)
    return found


if __name__ == "__main__":
    sys.exit(main())
