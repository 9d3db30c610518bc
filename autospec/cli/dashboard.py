"""`autospec dashboard`: the telemetry database in a browser."""

from __future__ import annotations

import ipaddress
import os
import socket
import webbrowser
from contextlib import suppress
from pathlib import Path

import click

from autospec.cli.extras import install_command

SHUTDOWN_SECONDS = 5


@click.command(name="dashboard")
@click.option("--store", required=True, show_envvar=True, help="Telemetry database, as in sqlite:///autospec.db.")
@click.option("--host", default="127.0.0.1", show_default=True, show_envvar=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65_535), default=8765, show_default=True, show_envvar=True, help="0: any free one."
)
@click.option("--token", default=None, show_envvar=True, help="Ask everyone for this; better given by the variable.")
@click.option("--insecure", is_flag=True, show_envvar=True, help="Let everyone in who reaches the address.")
@click.option(
    "--allow-host", "allowed_hosts", multiple=True, show_envvar=True, help="A name it is reached by; may be repeated."
)
@click.option("--study-storage", default=None, show_envvar=True, help="Of `autospec tune`: a page shows its studies.")
@click.option(
    "--policy",
    "policy_file",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    show_envvar=True,
    help="A file of `autospec tune`: a page shows it beside what was measured.",
)
@click.option(
    "--tokenizer",
    default=None,
    show_envvar=True,
    help="Of the target, a folder or hub id: tokens that were recorded are shown as text.",
)
@click.option("--open", "opens", is_flag=True, show_envvar=True, help="Open it in the browser.")
def command(
    store: str,
    host: str,
    port: int,
    token: str | None,
    insecure: bool,
    allowed_hosts: tuple[str, ...],
    study_storage: str | None,
    policy_file: Path | None,
    tokenizer: str | None,
    opens: bool,
) -> None:
    """Show speed-up and slow-down by segment in the browser, from a telemetry database that is opened read-only.

    Nothing leaves the host, but for a hub id given as --tokenizer, which is asked of the hub. Other addresses than this
    host's own need --token, or --insecure.
    """
    from autospec.errors import ConfigurationError
    from autospec.telemetry.store import Store

    if not is_loopback(host) and token is None and not insecure:
        raise ConfigurationError(
            f"--host {host} lets others reach the dashboard: give --token, which they are then asked for, or --insecure"
        )
    if not is_loopback(host) and token is None:
        click.echo(f"autospec dashboard: everyone who reaches {host} sees all of it (--insecure)", err=True)
    try:
        import uvicorn

        from autospec.telemetry.dashboard.app import create_app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("plotly", "starlette", "uvicorn"):
            raise
        how = install_command("dashboard") or "pip install 'autospec-decoding[dashboard]'"
        raise ConfigurationError(f"the dashboard needs {error.name}: {how}") from error
    names = allowed_hosts if is_loopback(host) else (*allowed_hosts, host, socket.gethostname())
    with Store(store, readonly=True) as opened, listen(host, port) as listening:
        app = create_app(
            opened,
            token=token,
            allowed_hosts=names,
            study_storage=study_storage,
            policy_file=policy_file,
            tokenizer=tokenizer,
        )
        address = address_of(host, listening.getsockname()[1])
        click.echo(f"autospec dashboard: {address} (Ctrl+C ends it)", err=True)
        if opens:
            webbrowser.open(address)
        config = uvicorn.Config(
            app, log_level="warning", server_header=False, timeout_graceful_shutdown=SHUTDOWN_SECONDS
        )
        server = uvicorn.Server(config)
        app.state.is_ending = lambda: server.should_exit
        with suppress(KeyboardInterrupt):  # raised again once the server has ended in good order
            server.run([listening])


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        AutospecError: the address is in use, or is none of this machine's.
    """
    from autospec.errors import AutospecError

    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise AutospecError(f"--host {host}: {error.strerror or error}") from error
    reasons = []
    for kind, _, _, _, place in places:
        listening = socket.socket(kind, socket.SOCK_STREAM)
        try:
            if os.name == "posix":
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(place)
            listening.listen(128)
            return listening
        except OSError as error:
            listening.close()
            reasons.append(error.strerror or str(error))
    raise AutospecError(
        f"cannot listen on {host}:{port} ({', '.join(reasons)}): give another --port, or 0 for any free one"
    )


def address_of(host: str, port: int) -> str:
    """Where a browser on this machine finds it."""
    shown = "127.0.0.1" if host in ("0.0.0.0", "") else "::1" if host == "::" else host
    return f"http://[{shown}]:{port}/" if ":" in shown else f"http://{shown}:{port}/"
