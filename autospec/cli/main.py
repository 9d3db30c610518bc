"""The command group, and how errors end a command."""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from typing import Any

import click

from autospec.errors import AutospecError, ConfigurationError

# name -> module that holds the command under the name `command`; loaded only when it is asked for
_COMMANDS = {
    "calibrate": "autospec.cli.calibrate",
    "certify": "autospec.cli.certify",
    "corpus": "autospec.cli.corpus",
    "dashboard": "autospec.cli.dashboard",
    "db": "autospec.cli.db",
    "demo": "autospec.cli.demo",
    "drafts": "autospec.cli.drafts",
    "explain": "autospec.cli.explain",
    "export": "autospec.cli.export",
    "ingest": "autospec.cli.ingest",
    "metrics": "autospec.cli.metrics",
    "models": "autospec.cli.models",
    "record": "autospec.cli.record",
    "report": "autospec.cli.report",
    "segments": "autospec.cli.segments",
    "traffic": "autospec.cli.traffic",
    "tune": "autospec.cli.tune",
    "verify": "autospec.cli.verify",
    "version": "autospec.cli.version",
}


class _UsedWronglyError(click.ClickException):
    exit_code = 2


class _Group(click.Group):
    """Loads a command when it is asked for, and turns autospec's errors into one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = import_module(_COMMANDS[cmd_name]).command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AutospecError as error:
            if ctx.params.get("debug"):
                raise
            kind = _UsedWronglyError if isinstance(error, ConfigurationError) else click.ClickException
            raise kind(" ".join(str(error).split())) from error
        except (click.ClickException, click.exceptions.Exit, click.Abort, KeyboardInterrupt):
            raise
        except Exception as error:
            if ctx.params.get("debug"):
                raise
            text = " ".join(f"{type(error).__name__}: {error}".split())
            raise click.ClickException(f"{text} (autospec --debug shows where)") from error


@click.group(
    cls=_Group,
    context_settings={
        "auto_envvar_prefix": "AUTOSPEC",
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    },
    epilog="Every option is also an environment variable: AUTOSPEC_REPORT_STORE for `autospec report --store`.",
)
@click.option("--debug", is_flag=True, show_envvar=True, help="Show the traceback of an error, and log what is done.")
@click.pass_context
def group(ctx: click.Context, debug: bool) -> None:
    """Exact, adaptive speculative decoding for Hugging Face transformers: it measures, learns and decides.

    Start with `autospec demo`, then wrap your own model: autospec.wrap(model, tokenizer=tokenizer).
    """
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO if debug else logging.WARNING, format="%(name)s: %(message)s"
    )


def main() -> None:
    """Entry point of the console script."""
    group(prog_name="autospec")
