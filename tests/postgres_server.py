"""A throw-away PostgreSQL server for the tests: started once when first asked for, in a temporary folder."""

from __future__ import annotations

import atexit
import functools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

START_SECONDS = 30.0


def binaries() -> Path | None:
    """The folder with `postgres` and `initdb`, if there is one."""
    candidates = [Path(found).resolve().parent for found in [shutil.which("postgres")] if found]
    candidates += [Path("/usr/local/bin"), *sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]
    for folder in candidates:
        if (folder / "postgres").exists() and (folder / "initdb").exists():
            return folder
    return None


def _unprivileged() -> dict[str, object]:
    """How to start a process as somebody else than root, whom PostgreSQL refuses to run as."""
    if os.getuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            account = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    pytest.skip("PostgreSQL refuses to run as root and there is no user postgres or nobody")


@functools.cache
def server() -> str | None:
    """Starts the server; its address as `user@host:port`, or None if PostgreSQL is not installed."""
    folder = binaries()
    if folder is None:
        return None
    account = _unprivileged()
    home = Path(tempfile.mkdtemp(prefix="autospec-postgres-"))
    if account:
        os.chown(home, account["user"], account["group"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    data, log = home / "data", home / "log"
    subprocess.run(
        [folder / "initdb", "-D", data, "-U", "autospec", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"],
        check=True,
        capture_output=True,
        cwd=home,
        **account,
    )
    options = ["listen_addresses=127.0.0.1", f"port={port}", f"unix_socket_directories={home}", "fsync=off"]
    options += ["shared_buffers=16MB", "max_connections=60", "timezone=Asia/Kolkata"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [folder / "postgres", "-D", data, *(part for option in options for part in ("-c", option))],
            stdout=output,
            stderr=output,
            cwd=home,
            **account,
        )
    atexit.register(_stop, process, home, os.getpid())
    address = f"autospec@127.0.0.1:{port}"
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            _run(address, "SELECT 1")
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL did not start:\n{log.read_text()}") from None
            time.sleep(0.05)
        else:
            return address


def _run(address: str, statement: str) -> None:
    import psycopg

    try:
        with psycopg.connect(f"postgresql://{address}/postgres", autocommit=True) as connection:
            connection.execute(statement)
    except psycopg.OperationalError as error:
        raise OSError(str(error)) from error


def _stop(process: subprocess.Popen[bytes], home: Path, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child must not stop the parent's server
    process.send_signal(signal.SIGINT)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    shutil.rmtree(home, ignore_errors=True)


@contextmanager
def away(url: str) -> Iterator[None]:
    """Inside the block the database takes no connections, and those there were are gone."""
    address, _, name = url.rpartition("://")[2].partition("/")
    _run(address, f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
    _run(address, f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
    try:
        yield
    finally:
        _run(address, f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")


@contextmanager
def fresh_database() -> Iterator[str]:
    """The URL of an empty database; skips the test, saying what is missing, where there is no PostgreSQL."""
    if binaries() is None:
        pytest.skip("PostgreSQL is not installed: no postgres and initdb on PATH or in /usr/lib/postgresql/*/bin")
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'psycopg[binary]'")
    address = server()
    assert address is not None
    name = f"test_{uuid.uuid4().hex[:12]}"
    _run(address, f"CREATE DATABASE {name}")
    try:
        yield f"postgresql+psycopg://{address}/{name}"
    finally:
        _run(address, f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
