"""Are sampled tokens distributed as plain sampling's? 20,000 answers of each kind, compared by a two-sample test.

    python experiments/05_sampled_tokens/run.py [--out DIR] [--work FILE] [--samples 20000] [--temperature 0.7]

Every answer is a production `generate` call. Forwards and top-p are pure functions that are asked the same few thousand
things over and over, so their results are remembered by their exact arguments. Each thousand answers are one line of
the work file and are not made again; two runs (one for each temperature) may share the file. Exits 1 if a case is told
apart from plain sampling, if the planted fault is not, or if answers differ when nothing is remembered.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import transformers
from scipy.stats import chi2_contingency
from torch import Tensor
from tqdm import tqdm
from transformers import TopPLogitsWarper

from autospec import models, wrap
from autospec.caches import CACHE_KEYWORD
from autospec.decoding import decoder
from autospec.decoding.selection import Maximal
from autospec.deployment import device_name
from autospec.drafts import Assistant
from autospec.drafts.early_exit import first_layers_of

TARGET = "smollm2-135m"
PROMPT = "To be or not to be, to be or not to"
DRAFT_LAYERS = 28
BLOCK_LENGTH = 2
NEW_TOKENS = 4  # the first comes from the prompt's forward; a block of two drafts and a bonus token can make the rest
TRIPLES = {"1-3": slice(0, 3), "2-4": slice(1, 4)}
TEMPERATURES = (0.7, 1.0)
TOP_P = 0.9
LEVEL = 1e-3
CHUNK = 1000  # answers from one seed
CHECKED_SAMPLES = 25  # of each case, made again with nothing remembered
COUNTED = ("samples", "judged", "accepted", "forwards_run", "forwards_remembered", "seconds")
FOLDER = Path(__file__).parent


class SampleAgain(Maximal):
    """A planted fault: what follows a rejection is drawn from p, not from the residual."""

    def residual(self, probs: Tensor, draft_probs: Tensor, num_accepted: Tensor) -> tuple[Tensor, Tensor]:
        p = probs.index_select(0, num_accepted[None])[0]
        return p, p.sum()


@dataclass(frozen=True)
class Setting:
    """How answers of a case are made; without a source by the model's own `generate`."""

    source: str | None = None
    sampling: str = "paired"
    is_faulty: bool = False


SETTINGS = {
    "plain": Setting(),
    "ngram paired": Setting("ngram"),
    "assistant paired": Setting("assistant"),
    "assistant maximal": Setting("assistant", "maximal"),
    "planted fault": Setting("assistant", "maximal", is_faulty=True),
}


class Case(NamedTuple):
    name: str
    temperature: float


CASES = [Case(name, temperature) for temperature in TEMPERATURES for name in SETTINGS]


class Memo:
    """Stands in a model's place for `forward` and remembers what each exact run of tokens gave.

    A result is known by all tokens before and in the forward, and by how they were split between the two. On a hit the
    recorded keys and values enter the cache by its own `update`, as they did when the model made them.
    """

    def __init__(self, model: Any) -> None:
        self._forward = model.forward
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...], int], tuple[type, Tensor, list[Any]]] = {}
        self.is_on = True
        self.hits = self.misses = 0
        functools.update_wrapper(self, model.forward)  # transformers reads the signature
        model.forward = self

    def __call__(self, **inputs: Any) -> Any:
        cache = inputs.get(CACHE_KEYWORD)
        if not self.is_on or cache is None:
            return self._forward(**inputs)
        length = cache.get_seq_length()
        before, tokens = getattr(cache, "memo_tokens", ())[:length], tuple(inputs["input_ids"][0].tolist())
        self._check(inputs, len(before), length, len(tokens))
        kept = inputs.get("logits_to_keep", 0)
        if (before, tokens, kept) in self._known:
            self.hits += 1
            kind, logits, layers = self._known[before, tokens, kept]
            for index, (keys, values) in enumerate(layers):
                cache.update(keys, values, index)
            outputs = kind(logits=logits.clone(), **{CACHE_KEYWORD: cache})
        else:
            self.misses += 1
            outputs = self._forward(**inputs)
            layers = [
                (layer.keys[:, :, length:].clone(), layer.values[:, :, length:].clone()) for layer in cache.layers
            ]
            self._known[before, tokens, kept] = type(outputs), outputs.logits.clone(), layers
        cache.memo_tokens = before + tokens
        if cache.get_seq_length() != len(cache.memo_tokens):
            raise RuntimeError(f"{cache.get_seq_length()} tokens in a cache of {len(cache.memo_tokens)}")
        return outputs

    @staticmethod
    def _check(inputs: dict[str, Any], known: int, length: int, width: int) -> None:
        """Nothing but the tokens may tell one forward from another."""
        mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
        is_plain = (
            inputs["input_ids"].shape[0] == 1
            and known == length
            and (mask is None or (mask.shape == (1, length + width) and bool(mask.all())))
            and (positions is None or positions.tolist() == [list(range(length, length + width))])
        )
        if not is_plain:
            raise RuntimeError(f"a forward of {width} tokens after {length} is not told by its tokens alone")


@contextmanager
def remembered_top_p() -> Iterator[None]:
    """Top-p sorts the whole vocabulary; what it made of the very same scores is looked up instead."""
    known: dict[tuple[float, bytes], Tensor] = {}
    original: Callable[..., Tensor] = TopPLogitsWarper.__call__

    def remembered(self: TopPLogitsWarper, input_ids: Tensor, scores: Tensor) -> Tensor:
        key = self.top_p, scores.numpy().tobytes()
        if key not in known:
            known[key] = original(self, input_ids, scores)
        return known[key].clone()

    with mock.patch.object(TopPLogitsWarper, "__call__", remembered):
        yield


class Bench:
    """Target, assistant and prompt, with both models' forwards remembered."""

    def __init__(self) -> None:
        self.model, self.tokenizer = models.load(TARGET, dtype="float32")
        draft = first_layers_of(self.model, DRAFT_LAYERS)
        self.drafts = {"ngram": "ngram", "assistant": Assistant(draft, tokenizer=self.tokenizer)}
        self.inputs = self.tokenizer(PROMPT, return_tensors="pt")
        self.memos = [Memo(self.model), Memo(draft)]

    def sample(self, case: Case, chunk: int, samples: int, *, is_remembering: bool = True) -> dict[str, Any]:
        """Some answers of one case, always the same ones: how often each came, and how drafts fared."""
        for memo in self.memos:
            memo.is_on, memo.hits, memo.misses = is_remembering, 0, 0
        torch.manual_seed(1000 * (CASES.index(case) + 1) + chunk)
        started, answers = time.perf_counter(), []
        drafted: Counter[str] = Counter()
        with (
            self._speculating(SETTINGS[case.name]) as speculator,
            remembered_top_p() if is_remembering else nullcontext(),
        ):
            for _ in range(samples):
                answers.append(self._answer(case.temperature))
                if speculator is not None:
                    record = speculator.last_request
                    if record.fallback_reason or record.notes:
                        raise RuntimeError(record.fallback_reason or record.notes)
                    drafted.update(judged=record.num_judged_tokens, accepted=record.num_accepted_tokens)
        return {
            "case": case.name,
            "temperature": case.temperature,
            "chunk": chunk,
            "samples": samples,
            "first": answers[:CHECKED_SAMPLES],
            "answers": Counter(answers),
            "judged": drafted["judged"],
            "accepted": drafted["accepted"],
            "forwards_run": sum(memo.misses for memo in self.memos),
            "forwards_remembered": sum(memo.hits for memo in self.memos),
            "seconds": round(time.perf_counter() - started, 1),
        }

    def _answer(self, temperature: float) -> str:
        output = self.model.generate(
            **self.inputs, do_sample=True, temperature=temperature, top_p=TOP_P, top_k=0, max_new_tokens=NEW_TOKENS
        )
        tokens = output[0, self.inputs["input_ids"].shape[1] :].tolist()
        return " ".join(map(str, tokens + [-1] * (NEW_TOKENS - len(tokens))))

    @contextmanager
    def _speculating(self, setting: Setting) -> Iterator[Any]:
        if setting.source is None:
            yield None
            return
        rule: AbstractContextManager[Any] = nullcontext()
        if setting.is_faulty:
            rule = mock.patch.object(decoder, "make_rule", lambda randomness, **_: SampleAgain(randomness))
        speculator = wrap(
            self.model,
            tokenizer=self.tokenizer,
            drafts=[self.drafts[setting.source]],
            policy=f"fixed:{setting.source}:{BLOCK_LENGTH}",
            sampling=setting.sampling,
        )
        with rule, speculator:
            yield speculator


def main() -> int:
    options = parse_options()
    bench = Bench()
    cases = [case for case in CASES if options.temperature in (None, case.temperature)]
    chunks = [(case, chunk) for case in cases for chunk in range(num_chunks(case, options.samples))]
    chunks.sort(key=lambda item: item[1])  # an interrupted run has a little of everything
    done = {(case, row["chunk"]) for case, rows in read_rows(options.work).items() for row in rows}
    for case, chunk in tqdm(chunks, unit=f"{CHUNK} answers"):
        if (case, chunk) not in done:
            row = bench.sample(case, chunk, CHUNK)
            if chunk == 0:
                afresh = bench.sample(case, chunk, CHECKED_SAMPLES, is_remembering=False)
                row["is_the_same_afresh"] = row["first"] == afresh["first"]
            with options.work.open("a", encoding="utf-8") as file:
                file.write("\n" + json.dumps(row) + "\n")  # the line before may have been cut short
    rows = {case: found[: num_chunks(case, options.samples)] for case, found in read_rows(options.work).items()}
    if missing := [case for case in CASES if len(rows.get(case, [])) < num_chunks(case, options.samples)]:
        print("still to do:", ", ".join(f"{case.name} at {case.temperature}" for case in missing))
        return 0
    results = {**about(bench, options.samples), "cases": [compared(rows, case) for case in CASES]}
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print_table(results["cases"])
    return 0 if all(case["is_as_expected"] for case in results["cases"]) else 1


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for results.json")
    parser.add_argument("--work", type=Path, default=None, help="finished chunks; work.jsonl in --out if left out")
    parser.add_argument("--samples", type=int, default=20_000, help=f"answers of each case, a multiple of {CHUNK}")
    parser.add_argument("--temperature", type=float, choices=TEMPERATURES, default=None, help="only this one")
    options = parser.parse_args()
    if options.samples < 2 * CHUNK or options.samples % CHUNK:
        parser.error(f"--samples {options.samples}: a multiple of {CHUNK}, at least {2 * CHUNK}")
    options.work = options.work or options.out / "work.jsonl"
    return options


def num_chunks(case: Case, samples: int) -> int:
    return max(1, samples // CHUNK // (4 if SETTINGS[case.name].is_faulty else 1))


def read_rows(work: Path) -> dict[Case, list[dict[str, Any]]]:
    """Finished chunks of each case, in order."""
    found: dict[tuple[Case, int], dict[str, Any]] = {}
    for line in work.read_text(encoding="utf-8").splitlines() if work.exists() else ():
        with suppress(ValueError):  # an empty line, or one cut short
            row = json.loads(line)
            found[Case(row["case"], row["temperature"]), row["chunk"]] = row
    rows: dict[Case, list[dict[str, Any]]] = {}
    for case, chunk in sorted(found):
        rows.setdefault(case, []).append(found[case, chunk])
    return rows


def about(bench: Bench, samples: int) -> dict[str, Any]:
    return {
        "target": TARGET,
        "dtype": "float32",
        "draft": f"the target's first {DRAFT_LAYERS} layers",
        "block_length": BLOCK_LENGTH,
        "new_tokens": NEW_TOKENS,
        "top_p": TOP_P,
        "samples": samples,
        "level": LEVEL,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device_name(bench.model.device),
    }


def compared(rows: dict[Case, list[dict[str, Any]]], case: Case) -> dict[str, Any]:
    """One case against plain sampling at the same temperature; plain itself, one half against the other."""
    found, plain = rows[case], rows[Case("plain", case.temperature)]
    counts: Counter[str] = Counter()
    for row in found:
        counts.update({key: row[key] for key in COUNTED})
    result: dict[str, Any] = {"case": case.name, "temperature": case.temperature, **counts}
    result["is_the_same_afresh"] = found[0]["is_the_same_afresh"]
    left, right = (found[::2], found[1::2]) if found is plain else (plain, found)
    for label, part in TRIPLES.items():
        result[label] = two_sample(triples(left, part), triples(right, part))
    is_told_apart = min(result[label]["p_value"] for label in TRIPLES) < LEVEL
    result["is_as_expected"] = result["is_the_same_afresh"] and is_told_apart == SETTINGS[case.name].is_faulty
    return result


def triples(rows: list[dict[str, Any]], part: slice) -> Counter[str]:
    counts: Counter[str] = Counter()
    for row in rows:
        for answer, count in row["answers"].items():
            counts[" ".join(answer.split()[part])] += count
    return counts


def two_sample(left: Counter[str], right: Counter[str]) -> dict[str, Any]:
    """Chi-square test of homogeneity, triples of fewer than 5 expected on a side pooled, and total variation."""
    names = sorted(left | right)
    table = np.array([[left[name] for name in names], [right[name] for name in names]])
    smallest = table.sum(axis=1).min() / table.sum()
    is_rare = table.sum(axis=0) * smallest < 5
    pooled = np.column_stack([table[:, ~is_rare], table[:, is_rare].sum(axis=1)])
    pooled = pooled[:, pooled.sum(axis=0) > 0]
    test = chi2_contingency(pooled, correction=False) if pooled.shape[1] > 1 else None
    return {
        "triples": len(names),
        "classes": pooled.shape[1],
        "p_value": float(test.pvalue) if test is not None else 1.0,
        "tv": total_variation(table),
        "tv_of_random_halves": random_halves(table),
    }


def total_variation(table: np.ndarray) -> float:
    """Args: table: [2, n], counts."""
    shares = table / table.sum(axis=1, keepdims=True)
    return float(np.abs(shares[0] - shares[1]).sum() / 2)


def random_halves(table: np.ndarray, repeats: int = 200) -> float:
    """The noise floor: mean total variation when all answers are dealt to two sides of these sizes at random."""
    generator = np.random.default_rng(0)
    both = table.sum(axis=0)
    left = generator.multivariate_hypergeometric(both, int(table[0].sum()), size=repeats)
    return float(np.mean([total_variation(np.stack([side, both - side])) for side in left]))


def print_table(cases: list[dict[str, Any]]) -> None:
    print("| T | case | accepted / judged | tokens | different triples | classes tested | p-value | TV | noise floor |")
    print("|---|---|---|---|---|---|---|---|---|")
    for case in cases:
        accepted = f"{case['accepted']} / {case['judged']}" if case["judged"] else "-"
        for label in TRIPLES:
            test = case[label]
            names = f"{case['temperature']} | {case['case']} | {accepted} | {label}"
            counts = f"{test['triples']} | {test['classes']} | {test['p_value']:.2g}"
            print(f"| {names} | {counts} | {test['tv']:.4f} | {test['tv_of_random_halves']:.4f} |")


if __name__ == "__main__":
    sys.exit(main())
