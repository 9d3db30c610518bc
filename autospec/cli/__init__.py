"""The command line: `autospec COMMAND`. Every option is also an environment variable, `AUTOSPEC_COMMAND_OPTION`."""

from autospec.cli.main import main

__all__ = ["main"]
