"""What commands that decode have in common: the models they load, and the sources they draft with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import click

HalfOrFull = Literal["bfloat16", "float32", "float16"]
Command = TypeVar("Command", bound=Callable[..., Any])

prompts_option = click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=None,
    show_envvar=True,
    help="JSONL with messages or prompt, segment, max_new_tokens; the demonstration's own if left out.",
)
target_option = click.option(
    "--target", default="smollm2-135m", show_default=True, show_envvar=True, help="Model folder or hub id."
)
backend_option = click.option(
    "--backend",
    type=click.Choice(["auto", "eager", "packed", "compile"]),
    default="auto",
    show_default=True,
    show_envvar=True,
    help="How forwards run: as the model runs them, with packed layers (CPU), or compiled (CPU: for minutes).",
)
block_lengths_option = click.option(
    "--block-lengths", default="1,2,4,8,16", show_default=True, show_envvar=True, help="Comma-separated, each >= 1."
)


def dtype_option(default: HalfOrFull) -> Callable[[Command], Command]:
    """`--dtype`, of all models that a command loads."""
    return click.option(
        "--dtype",
        type=click.Choice(["float32", "bfloat16", "float16"]),
        default=default,
        show_default=True,
        show_envvar=True,
        help="Number format of the models.",
    )


ASSISTANTS = {"smollm2-135m": "smollm2-135m-assistant"}
"""The assistant that comes with autospec, by the target it was made for."""


def assistant_for(target: str, assistant: str | None) -> str | None:
    """The one named, that which comes with autospec for the target, or None; `none` is none."""
    return ASSISTANTS.get(target) if assistant is None else None if assistant == "none" else assistant


def load_models(target: str, assistant: str | None, dtype: HalfOrFull) -> tuple[Any, Any, list[Any]]:
    """Target, its tokenizer, and the draft sources: `ngram`, and an assistant if one is named."""
    from autospec import models

    click.echo(f"loading {target} ...", err=True)
    model, tokenizer = models.load(target, dtype=dtype)
    drafts: list[Any] = ["ngram"]
    if assistant is not None:
        drafts.append(load_assistant(assistant, dtype))
    return model, tokenizer, drafts


def load_assistant(name: str, dtype: HalfOrFull) -> Any:
    """A smaller model to draft with; its tokenizer is its own, or the target's where it comes without."""
    from autospec import models
    from autospec.drafts import Assistant

    click.echo(f"loading {name} ...", err=True)
    place = models.resolve(name)
    if Path(place).is_dir() and not (Path(place) / "tokenizer_config.json").is_file():
        return Assistant(models.load_model(name, dtype=dtype))
    model, tokenizer = models.load(name, dtype=dtype)
    return Assistant(model, tokenizer=tokenizer)


def parse_lengths(text: str) -> tuple[int, ...]:
    """Block lengths as a user writes them, `1,2,4`."""
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 1:
        raise click.BadParameter(
            f"{text!r}: whole numbers of at least 1, separated by commas", param_hint="--block-lengths"
        )
    return lengths
