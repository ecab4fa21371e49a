"""The wheel has every file of the package, and works from a fresh environment in another folder; the Dockerfile
installs it. Only its own files are installed: the libraries are those of the tests."""

import fnmatch
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

import zero2all
from tests.pages import ROOT
from zero2all.config import preset_files

DOCKERFILE = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())
STEPS = re.findall(r"(?m)^(RUN|COPY) (.*)$", DOCKERFILE)
NEEDS_ROOT = ("apt-get", "useradd", "chown", "mkdir", "rm -rf /var")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def docker_context(target: Path) -> Path:
    """A folder with what the Dockerfile copies, without what .dockerignore leaves out."""
    rules = (ROOT / ".dockerignore").read_text().split()
    allowed = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    ignored = [rule.removeprefix("**/") for rule in rules if rule.startswith("**/")]
    for words in (words for kind, words in STEPS if kind == "COPY"):
        *sources, place = words.split()
        for source in sources:
            assert source in allowed, f"Dockerfile: COPY {source}, which .dockerignore leaves out"
            assert (ROOT / source).exists(), f"Dockerfile: COPY {source}, which is not there"
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, target / place, ignore=shutil.ignore_patterns(*ignored))
            else:
                shutil.copy(ROOT / source, target / place)
    return target


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What the RUN lines of the Dockerfile that need no root make, below a temporary folder: environment and wheel."""
    root = tmp_path_factory.mktemp("root")
    (root / "build").mkdir()
    docker_context(root / "build")
    tools = root / "tools"  # what a build downloads
    tools.mkdir()
    for path in Path(sysconfig.get_path("purelib")).glob("*"):
        if fnmatch.fnmatch(path.name, "setuptools*") or path.name in ("_distutils_hack", "pkg_resources"):
            (tools / path.name).symlink_to(path)
    place = {"/opt/zero2all": str(root / "opt"), "/build": str(root / "build"), "python3": sys.executable}
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    clean |= {"PATH": f"{root / 'opt' / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(tools)}
    clean |= {"PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1"}  # 0: pip reads it as "no"
    for words in (words for kind, words in STEPS if kind == "RUN"):
        for command in words.split("&&"):
            for name, path in place.items():
                command = re.sub(rf"(?<![\w/]){re.escape(name)}(?![\w-])", path, command)
            if command.strip().startswith(NEEDS_ROOT) or "rm -rf" in command:
                continue
            done = subprocess.run(command, shell=True, cwd=root / "build", env=clean, capture_output=True, text=True)
            assert done.returncode == 0, f"RUN {command.strip()}\n{done.stdout}{done.stderr}"
    (wheel,) = (root / "build" / "dist").glob("*.whl")
    (site,) = (root / "opt" / "lib").glob("python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")  # after pip, which would see our checkout
    return root / "opt", wheel


def said(environment: Path, folder: Path, *words: object, **variables: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [environment / "bin" / str(words[0]), *map(str, words[1:])]
    done = subprocess.run(command, cwd=folder, env={**clean, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_the_wheel_has_every_file_of_the_package_and_the_presets(installed):
    names = set(zipfile.ZipFile(installed[1]).namelist())
    package = {path.relative_to(ROOT) for path in (ROOT / "zero2all").rglob("*") if path.is_file()}
    package = {path.as_posix() for path in package if "__pycache__" not in path.parts}
    assert package - names == set()
    assert {name for name in names if name.startswith("zero2all/")} - package == set()
    presets = {Path(name).stem for name in names if "/data/share/zero2all/configs/" in name}
    assert presets == {path.stem for path in (ROOT / "configs").glob("*.yaml")}


def test_the_installed_command_finds_its_files_from_another_folder(installed, tmp_path):
    environment, _ = installed
    assert said(environment, tmp_path, "z2a", "--version").strip() == f"z2a {zero2all.__version__}"
    assert "vocab_size: 3072" in said(environment, tmp_path, "z2a", "train", "quickstart", "--print-config")
    assert "用法" in said(environment, tmp_path, "z2a", "--help", Z2A_LANG="zh")
    code = "import zero2all; print(zero2all.__file__, all(map(callable, (zero2all.load, zero2all.train_run))))"
    where, can_call = said(environment, tmp_path, "python", "-c", code).split()
    assert Path(where).is_relative_to(environment)
    assert can_call == "True"


def test_presets_are_found_beside_a_package_that_was_installed_into_a_folder(installed, tmp_path):
    _, wheel = installed
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", tmp_path / "there", wheel]
    subprocess.run(pip, check=True, capture_output=True)
    code = "from zero2all.config import preset_files; print(*preset_files().values())"
    variables = {**os.environ, "PYTHONPATH": str(tmp_path / "there")}
    found = subprocess.check_output([sys.executable, "-P", "-c", code], cwd=tmp_path, env=variables, text=True).split()
    assert len(found) == len(preset_files())
    assert all(Path(path).is_relative_to(tmp_path) for path in found)


def test_extras_that_the_dockerfile_and_the_pages_name_exist():
    pages = [ROOT / "Dockerfile", *ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    named = {
        extra
        for page in pages
        for found in re.findall(r"(?:zero2all|\.|\.whl\))\[([a-z0-9, ]+)\]", page.read_text())
        for extra in re.split(r", *", found)
    }
    assert {"fa4", "liger"} <= named
    assert named - set(PROJECT["optional-dependencies"]) == set()


def test_what_needs_root_in_the_dockerfile_is_what_is_known_here():
    """These lines are not run by the tests: a new one is to be looked at."""
    commands = [part.strip() for kind, words in STEPS if kind == "RUN" for part in words.split("&&")]
    first = [shlex.split(command)[0] for command in commands if command.startswith(NEEDS_ROOT)]
    assert first == ["apt-get", "apt-get", "rm", "useradd", "mkdir", "chown"]
    entry = re.search(r'ENTRYPOINT \["(.*)"\]', DOCKERFILE)
    assert entry is not None
    assert entry[1] in PROJECT["scripts"]
    packages = next(command for command in commands if "install --yes" in command).split()
    assert {"python3", "python3-venv", "python3-dev", "gcc", "g++"} <= set(packages)
