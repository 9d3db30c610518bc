from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKS = {"autospec/policies": "../policies", "autospec/telemetry": "../telemetry"}
HEAVY = (
    "opentelemetry",
    "optuna",
    "pandas",
    "prometheus_client",
    "sklearn",
    "sqlalchemy",
    "starlette",
    "torch",
    "transformers",
)
IMPORT_SECONDS = 0.3
# Put together here, so that this file does not contain them.
FORBIDDEN = [
    *(f"/{folder}/" for folder in ("work", "root", "opt/wheels", "opt/pypi")),
    *(f"{host}.{end}" for host, end in (("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org"), ("npmjs", "com"))),
    "deb." + "debian.org",
]


def pyproject() -> dict[str, dict[str, dict[str, object]]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_packages_are_the_folders_of_the_tree() -> None:
    listed = pyproject()["tool"]["setuptools"]["packages"]
    assert isinstance(listed, list)
    found = set()
    for parent, folders, files in os.walk(ROOT / "autospec", followlinks=True):
        folders[:] = [folder for folder in folders if folder != "__pycache__"]
        if "__init__.py" in files:
            found.add(Path(parent).relative_to(ROOT).as_posix().replace("/", "."))
    assert sorted(listed) == sorted(set(listed)), "a package is listed twice"
    assert sorted(listed) == sorted(found), "[tool.setuptools] packages in pyproject.toml and the tree differ"


@pytest.mark.parametrize("link", LINKS)
def test_links_are_relative(link: str) -> None:
    assert (ROOT / link).is_symlink()
    assert os.readlink(ROOT / link) == LINKS[link]
    assert (ROOT / link / "__init__.py").is_file()


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)


def test_import_loads_nothing_heavy() -> None:
    code = f"import sys, autospec; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    assert run_python(code).stdout.split() == []


def test_import_is_fast() -> None:
    def seconds(code: str) -> float:
        start = time.perf_counter()
        run_python(code)
        return time.perf_counter() - start

    seconds("import autospec")  # writes the byte code
    extra = min(seconds("import autospec") for _ in range(5)) - min(seconds("pass") for _ in range(5))
    assert extra < IMPORT_SECONDS


def committed_files() -> list[Path]:
    """What git tracks or would track; in a copy without git, what is not hidden or generated."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if (ROOT / ".git").exists():
        names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        paths = [ROOT / name for name in names if name]
    else:
        paths = [path for path in ROOT.rglob("*") if not any(_is_made(part) for part in path.parts)]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def _is_made(part: str) -> bool:
    return part.startswith(".") or part == "node_modules"


def test_no_file_names_this_machine_or_a_registry_host() -> None:
    found = []
    for path in committed_files():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # not text
        for number, line in enumerate(lines, 1):
            found += [f"{path.relative_to(ROOT)}:{number}: {text}" for text in FORBIDDEN if text in line]
    assert found == []


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-dev.lock"])
def test_locks_pin_everything_and_need_no_gpu_packages(lock: str) -> None:
    lines = [line.split("#")[0].strip() for line in (ROOT / lock).read_text(encoding="utf-8").splitlines()]
    pins = dict(line.split(";")[0].strip().split("==") for line in lines if line)
    assert pins["torch"] == "2.13.0", "the release that has a CPU build"
    unused = {"triton"} if "dev" in lock else set()  # xgrammar asks for it, and does not load it on the CPU
    assert {name for name in pins if name.startswith(("nvidia", "cuda", "triton"))} <= unused


def test_the_dev_lock_holds_everything_that_pyproject_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    names = {re.split(r"[\[<>=;~! ]", requirement)[0].lower() for requirement in asked}
    lock = (ROOT / "requirements-dev.lock").read_text(encoding="utf-8")
    pinned = {line.split("==")[0].lower() for line in lock.splitlines() if "==" in line}
    assert sorted(names - pinned) == []


def test_dev_lock_agrees_with_the_runtime_lock() -> None:
    def pins(lock: str) -> set[str]:
        lines = (ROOT / lock).read_text(encoding="utf-8").splitlines()
        return {pin for line in lines if (pin := line.split("#")[0].strip())}

    assert pins("requirements.lock") <= pins("requirements-dev.lock")


def test_the_demonstration_can_end_with_the_dashboard() -> None:
    """`make demo` installs the runtime's lock alone, and its last line opens the dashboard."""
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    names = {requirement.partition(">")[0] for requirement in extra["dashboard"]}
    pinned = {line.partition("==")[0] for line in (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()}
    assert names
    assert sorted(names - pinned) == []


def test_axe_core_is_pinned_by_its_hash_and_names_no_registry() -> None:
    folder = ROOT / "tests" / "axe"
    asked = json.loads((folder / "package.json").read_text(encoding="utf-8"))["dependencies"]["axe-core"]
    locked = json.loads((folder / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    assert set(locked) == {"", "node_modules/axe-core"}
    axe = locked["node_modules/axe-core"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", asked)
    assert axe["version"] == asked
    assert re.fullmatch(r"sha512-[A-Za-z0-9+/]{86}==", axe["integrity"])
    assert "resolved" not in axe


def test_wheel_carries_all_parts(tmp_path: Path) -> None:
    tree = tmp_path / "tree"  # a copy: the build writes beside its sources
    for name in ("autospec", "policies", "telemetry"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    built = subprocess.run(
        [*command, "--wheel-dir", str(tmp_path), str(tree)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("autospec_decoding-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())

    def modules(folder: str, kinds: tuple[str, ...]) -> set[str]:
        return {
            path.relative_to(ROOT / folder).as_posix() for path in (ROOT / folder).rglob("*") if path.suffix in kinds
        }

    kinds = (".py", ".mako", ".json", ".yml", ".html", ".css", ".js", ".svg")
    for folder in ("policies", "telemetry"):
        assert {f"autospec/{folder}/{name}" for name in modules(folder, kinds)} <= names
    assert {f"autospec/data/{name}" for name in modules("autospec/data", (".py", ".jsonl"))} <= names
    assert "autospec/data/demo_prompts.jsonl" in names
    assert {f"autospec/data/smollm2-135m-assistant/{name}" for name in ("config.json", "model.safetensors")} <= names
    assert "autospec/py.typed" in names
    assert not {name.split("/")[0] for name in names} & {"policies", "telemetry", "tests", "experiments"}
