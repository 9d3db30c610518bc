"""`autospec corpus`: pools of texts for the `suffix` source."""

from __future__ import annotations

import os
from json import dumps
from pathlib import Path

import click


@click.group(name="corpus")
def command() -> None:
    """Fill the pool of texts that the draft source `suffix` copies from."""


@command.command(name="add")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--pool",
    type=click.Path(path_type=Path),
    required=True,
    show_envvar=True,
    help="File of the pool; made if missing.",
)
@click.option("--tokenizer", required=True, show_envvar=True, help="The target: model folder, hub id, or smollm2-135m.")
@click.option(
    "--max-tokens",
    type=click.IntRange(min=2),
    default=1_000_000,
    show_default=True,
    show_envvar=True,
    help="Bound of the pool; the oldest texts go first.",
)
@click.option("--json", is_flag=True, show_envvar=True, help="Print one JSON object.")
def add(files: tuple[Path, ...], pool: Path, tokenizer: str, max_tokens: int, json: bool) -> None:
    """Add the texts of FILES to a pool.

    A .jsonl file has one object a line with text, completion or token_ids; any other file is one text, in UTF-8. The
    pool is replaced only when everything went well. Use it: autospec.drafts.Suffix("pool.npz").
    """
    from tqdm import tqdm
    from transformers import AutoTokenizer

    from autospec import models
    from autospec.corpus import add_file
    from autospec.drafts import SuffixPool
    from autospec.errors import ConfigurationError

    if not pool.parent.is_dir():
        raise ConfigurationError(f"there is no folder {pool.parent}: make it first, or give another --pool")
    texts = SuffixPool.load(pool, max_tokens=max_tokens) if pool.exists() else SuffixPool(max_tokens=max_tokens)
    known = AutoTokenizer.from_pretrained(models.resolve(tokenizer))
    added = [add_file(texts, file, known) for file in tqdm(files, desc="corpus", unit="file")]
    unfinished = pool.with_name(f"{pool.name}.{os.getpid()}.tmp")
    try:
        texts.save(unfinished)
        unfinished.replace(pool)
    finally:
        unfinished.unlink(missing_ok=True)
    counts = {
        "texts": sum(a.texts for a in added),
        "tokens": sum(a.tokens for a in added),
        "pool_tokens": texts.num_tokens,
    }
    if json:
        click.echo(dumps({"pool": str(pool), **counts}))
    else:
        click.echo(
            f"{pool}: {counts['texts']} texts, {counts['tokens']} tokens added; {texts.num_tokens} tokens in all"
        )
