"""What a folder of traffic was recorded with. Token ids mean nothing without the tokenizer they are of."""

from __future__ import annotations

import json
import os
import platform
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from autospec.errors import AutospecError, ConfigurationError
from autospec.notices import warn

NAME = "manifest.json"
FORMAT = 1
_PACKAGES = {"autospec": "autospec-decoding", "torch": "torch", "transformers": "transformers"}


@dataclass(frozen=True, slots=True)
class Manifest:
    """Target, tokenizer and versions of a folder of traffic."""

    target: str | None  # None where traffic was imported for a tokenizer alone
    tokenizer: str  # its name
    fingerprint: str  # of which id stands for which text
    versions: Mapping[str, str]
    created_at: str  # UTC, ISO 8601
    format: int = FORMAT

    @classmethod
    def of(cls, tokenizer: Any, target: str | None = None) -> Manifest:
        """What would be written for this tokenizer and target now."""
        from autospec.drafts.vocabulary import fingerprint  # heavy: its package loads torch

        return cls(target, _name(tokenizer), fingerprint(tokenizer), _versions(), datetime.now(UTC).isoformat())

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The folder's own; None where there is none.

        Raises:
            ConfigurationError: it cannot be read, or is of a newer autospec.
        """
        path = folder / NAME
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise ConfigurationError(f"{path}: {error.strerror or type(error).__name__}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(f"{path} is damaged ({error}): put a copy of it back") from error
        found = content.get("format") if isinstance(content, dict) else None
        if type(found) is int and found > FORMAT:
            raise ConfigurationError(f"{path} has format {found}, this autospec knows up to {FORMAT}: update autospec")
        try:
            return cls(
                target=content["target"],
                tokenizer=str(content["tokenizer"]),
                fingerprint=str(content["fingerprint"]),
                versions=dict(content["versions"]),
                created_at=str(content["created_at"]),
                format=int(content["format"]),
            )
        except (TypeError, KeyError, ValueError) as error:
            raise ConfigurationError(
                f"{path} is damaged ({type(error).__name__}: {error}): put a copy of it back"
            ) from error

    def write(self, folder: Path) -> Manifest:
        """Make the folder, and in it this manifest if there is none. Returns: the one that is there now.

        Raises:
            AutospecError: it cannot be written.
        """
        path, partial = folder / NAME, folder / f".{NAME}.{uuid.uuid4().hex}"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(asdict(replace(self, versions=dict(self.versions))), file, indent=1)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):  # another process was faster: its manifest counts
                os.link(partial, path)
        except OSError as error:
            raise AutospecError(f"cannot write {path}: {error.strerror or type(error).__name__}") from error
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
        return Manifest.read(folder) or self

    def check_same(self, other: Manifest, folder: Path) -> None:
        """Raise unless both are of the same tokenizer; warn where the targets differ.

        Raises:
            ConfigurationError: the tokenizers differ, with both names.
        """
        if self.fingerprint != other.fingerprint:
            raise ConfigurationError(
                f"{folder} holds traffic of tokenizer {self.tokenizer!r} ({self.fingerprint[:8]}), not of "
                f"{other.tokenizer!r} ({other.fingerprint[:8]}): token ids would mean other text; give another folder"
            )
        if self.target and other.target and self.target != other.target:
            warn(f"{folder} holds traffic of target {self.target!r}, and is used with {other.target!r}", stacklevel=3)


def check_folder(folder: Path, wanted: Manifest) -> Manifest | None:
    """The manifest of a folder that may be written to; None where there is none yet.

    Raises:
        ConfigurationError: it is no folder, or holds traffic of another tokenizer.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigurationError(f"{folder} is a file: give a folder for traffic")
    found = Manifest.read(folder)
    if found is not None:
        found.check_same(wanted, folder)
    return found


def open_folder(folder: Path, wanted: Manifest) -> Manifest:
    """The manifest of a folder to write to, made if there is none.

    Raises:
        ConfigurationError: it is no folder, or holds traffic of another tokenizer.
        AutospecError: it cannot be written.
    """
    found = check_folder(folder, wanted)
    if found is None:
        found = wanted.write(folder)
        found.check_same(wanted, folder)  # another process may have been faster
    return found


def _name(tokenizer: Any) -> str:
    """Without the folders of this machine."""
    name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
    return Path(name).name if Path(name).is_absolute() else name


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name, package in _PACKAGES.items():
        with suppress(PackageNotFoundError):
            versions[name] = version(package)
    return versions
