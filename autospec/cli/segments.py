"""`autospec segments`: why a prompt is in its segment, and clusters made from prompts."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autospec.cli.loading import (
    HalfOrFull,
    block_lengths_option,
    dtype_option,
    parse_lengths,
    prompts_option,
    target_option,
)

if TYPE_CHECKING:
    from autospec.segments import Assignment, Prompt, Segmenter

_WHY_COLUMNS = 160


@click.group(name="segments")
def command() -> None:
    """See why prompts are in their segments, and learn segments from prompts."""


@command.command(name="explain")
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    show_envvar=True,
    help="TOML file with [segments]; the built-in segments if neither this nor --clusters is given.",
)
@click.option(
    "--clusters",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    show_envvar=True,
    help="File of `autospec segments fit`, asked last; in place of the one that --config names.",
)
@click.option("--text", default=None, show_envvar=True, help="One prompt.")
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=None,
    show_envvar=True,
    help="JSONL with messages or prompt; their own segments are not looked at.",
)
@click.option(
    "--tokenizer",
    default=None,
    show_envvar=True,
    help="The target: prompts are then seen as `generate` gets them. Without it tokens are estimated.",
)
@click.option("--tenant", default=None, show_envvar=True, help="As if inside autospec.tenant(...).")
@click.option(
    "--decoding", default="greedy", show_default=True, show_envvar=True, help="As in `sample temperature=0.8`."
)
@click.option("--json", is_flag=True, show_envvar=True, help="Print one JSON object.")
def explain_command(
    config: Path | None,
    clusters: Path | None,
    text: str | None,
    prompts: Path | None,
    tokenizer: str | None,
    tenant: str | None,
    decoding: str,
    json: bool,
) -> None:
    """Print the segment of each prompt, what chose it, and why."""
    from autospec.segments import clean
    from autospec.telemetry.labels import visible

    if (text is None) == (prompts is None):
        raise click.UsageError("give either --text or --prompts")
    segmenter = _segmenter(config, clusters)
    options = {
        "do_sample": decoding.split(" ")[0] == "sample",
        "decoding": decoding,
        "tenant": clean(tenant, "tenant") if tenant is not None else None,
    }
    asked = _prompts(text, prompts, tokenizer, options)
    found = [(name, segmenter.assign(prompt), prompt) for name, prompt in asked]
    if json:
        rows = [
            {
                "prompt_id": name,
                "segment": each.segment,
                "origin": each.origin,
                "why": each.why,
                "prompt_tokens": prompt.prompt_tokens,
            }
            for name, each, prompt in found
        ]
        click.echo(dumps({"prompts": rows}))
        return
    for name, each, _ in found:
        click.echo(_line(name, each) if prompts is not None else f"{visible(each.segment, 80)} ({each.origin})")
        click.echo(f"    {visible(each.why, _WHY_COLUMNS)}")


@command.command(name="fit")
@prompts_option
@target_option
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("clusters.npz"),
    show_default=True,
    show_envvar=True,
    help="File of the clusters.",
)
@click.option(
    "--counts",
    default="2,3,4,6,8,12,16",
    show_default=True,
    show_envvar=True,
    help="Numbers of clusters to try, comma-separated, each >= 2.",
)
@click.option(
    "--drafts",
    default="ngram,suffix",
    show_default=True,
    show_envvar=True,
    help="Names of draft sources whose acceptance is to be separated, comma-separated.",
)
@block_lengths_option
@click.option("--limit", type=click.IntRange(min=1), default=None, show_envvar=True, help="Only so many prompts.")
@click.option(
    "--new-tokens",
    type=click.IntRange(min=3),
    default=None,
    show_envvar=True,
    help="Tokens of each answer; the prompt's own number if left out.",
)
@dtype_option("bfloat16")
@click.option("--seed", type=int, default=0, show_default=True, show_envvar=True, help="Of folds and centres.")
@click.option("--json", is_flag=True, show_envvar=True, help="Print one JSON object instead of the table.")
def fit_command(
    prompts: Path | None,
    target: str,
    out: Path,
    counts: str,
    drafts: str,
    block_lengths: str,
    limit: int | None,
    new_tokens: int | None,
    dtype: HalfOrFull,
    seed: int,
    json: bool,
) -> None:
    """Learn segments from your prompts, as many as separate acceptance best.

    The target answers each prompt once, greedily; the draft sources are replayed along the answers. Clusters are made
    from the prompts' text for each number of them, and the number is kept whose clusters predict best how many draft
    tokens are accepted per block, for prompts that were left out. Exits with 1, and writes nothing, if none predicts
    better than one segment for all.
    """
    from numpy import bincount
    from tqdm import tqdm

    from autospec import models
    from autospec.cluster_choice import FOLDS, best, candidates, measure
    from autospec.data import interleaved, load_prompts
    from autospec.drafts import make_sources
    from autospec.replay import record
    from autospec.segments.clusters import MAX_CLUSTERS, fit_clusters, points_of

    lengths = parse_lengths(block_lengths)
    tried = _counts(counts, MAX_CLUSTERS)
    names = [name.strip() for name in drafts.split(",") if name.strip() not in ("", "none")]
    if not names:
        raise click.UsageError("no draft source: name some with --drafts")
    make_sources(names)
    if not out.parent.is_dir():  # better known before minutes of work than after them
        raise click.UsageError(f"--out: there is no folder {out.parent}")
    chosen = list(interleaved(load_prompts(prompts)))[:limit]
    if len(chosen) < 2 * FOLDS:
        raise click.UsageError(f"{len(chosen)} prompts are too few to leave some out: at least {2 * FOLDS} are needed")
    click.echo(f"loading {target} ...", err=True)
    model, tokenizer = models.load(target, dtype=dtype)
    answers = record(model, tokenizer, chosen, {"do_sample": False}, max_new_tokens=new_tokens)
    recordings = list(tqdm(answers, total=len(chosen), desc="answers", unit="answer"))
    if len(recordings) < 2 * FOLDS:
        raise click.ClickException(f"only {len(recordings)} answers are long enough for a draft: three tokens each")
    makers = [lambda name=name: make_sources([name])[name] for name in names]
    replays = measure(model, tokenizer, recordings, makers, block_lengths=lengths)
    measured = list(tqdm(replays, total=len(recordings), desc="replays", unit="answer"))
    found = list(tqdm(candidates(measured, tried, seed=seed), total=len(tried), desc="clusters", unit="number"))
    choice = best(found)
    sizes: dict[str, int] = {}
    if choice is not None:
        points = points_of([each.prompt for each in measured])
        clusters = fit_clusters(points, choice.clusters, seed=seed)
        clusters.notes |= {
            "target": target,
            "drafts": names,
            "block_lengths": list(lengths),
            "separation": {str(each.clusters): round(each.separation, 4) for each in found},
        }
        clusters.save(out)
        sizes = {clusters.names[place]: int(size) for place, size in enumerate(bincount(clusters.places(points)))}
    if json:
        rows = [{"clusters": each.clusters, "separation": round(each.separation, 4)} for each in found]
        kept = choice.clusters if choice is not None else 1
        click.echo(dumps({"prompts": len(measured), "kept": kept, "candidates": rows, "sizes": sizes}))
    else:
        click.echo(_table(found, choice))
    if choice is None:
        raise click.ClickException("no number of clusters is better than one segment for all: nothing is written")
    click.echo(f"{out}: {len(sizes)} clusters of {len(measured)} prompts", err=json)


def _segmenter(config: Path | None, clusters: Path | None) -> Segmenter:
    from autospec.segments import Segmenter
    from autospec.segments.clusters import Clusters

    if config is None:
        return Segmenter(builtin=clusters is None, clusters=Clusters.load(clusters) if clusters is not None else None)
    return Segmenter.from_file(config, clusters=clusters)


def _prompts(
    text: str | None, prompts: Path | None, tokenizer: str | None, options: dict[str, Any]
) -> list[tuple[str, Prompt]]:
    """Each prompt with its name, as a segmenter would get it."""
    from autospec.data import DemoPrompt, load_prompts
    from autospec.segments import Prompt

    asked = load_prompts(prompts) if text is None else [DemoPrompt("text", "", ({"role": "user", "content": text},), 1)]
    if tokenizer is None:
        if text is not None:
            return [("text", Prompt.of_text(text, **options))]
        return [
            (p.prompt_id, Prompt.of_text("".join(f"<|{m['role']}|>\n{m['content']}\n" for m in p.messages), **options))
            for p in asked
        ]
    from transformers import AutoTokenizer

    from autospec import models

    known = AutoTokenizer.from_pretrained(models.resolve(tokenizer))
    return [
        (
            prompt.prompt_id,
            Prompt.of_ids(
                known.apply_chat_template(
                    [dict(message) for message in prompt.messages], add_generation_prompt=True, return_dict=True
                )["input_ids"],
                known,
                **options,
            ),
        )
        for prompt in asked
    ]


def _line(name: str, found: Assignment) -> str:
    from autospec.telemetry.labels import pad, visible

    return f"{pad(visible(name, 24), 24)}  {pad(visible(found.segment, 40), 24)}  {found.origin}"


def _counts(text: str, most: int) -> tuple[int, ...]:
    try:
        counts = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 2 or max(counts) > most:
        raise click.BadParameter(f"{text!r}: whole numbers of 2 to {most}, separated by commas", param_hint="--counts")
    return counts


def _table(found: list[Any], choice: Any | None) -> str:
    lines = ["clusters  separation", f"{1:>8}  {0:>10.3f}{'  kept' if choice is None else ''}"]
    lines += [f"{c.clusters:>8}  {c.separation:>10.3f}{'  kept' if c is choice else ''}" for c in found]
    return "\n".join(
        [
            *lines,
            "",
            "separation: share of the squared error of accepted tokens per block (+1 not included) that is gone when a "
            "prompt left out",
            "is predicted by its cluster in place of all prompts; below 0 the clusters mislead.",
        ]
    )
