"""What commands that decode have in common: the models they load."""

from __future__ import annotations

from typing import Any, Literal

import click

HalfOrFull = Literal["bfloat16", "float32", "float16"]


def load_models(target: str, assistant: str | None, dtype: HalfOrFull) -> tuple[Any, Any, list[Any]]:
    """Target, its tokenizer, and the draft sources: `ngram`, and an assistant if one is named."""
    from autospec import models

    click.echo(f"loading {target} ...", err=True)
    model, tokenizer = models.load(target, dtype=dtype)
    drafts: list[Any] = ["ngram"]
    if assistant is not None:
        from autospec.drafts import Assistant

        click.echo(f"loading {assistant} ...", err=True)
        small_model, small_tokenizer = models.load(assistant, dtype=dtype)
        drafts.append(Assistant(small_model, tokenizer=small_tokenizer))
    return model, tokenizer, drafts
