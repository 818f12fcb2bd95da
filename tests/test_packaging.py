# SPDX-License-Identifier: Apache-2.0
"""What is shipped: an sdist and a wheel built where torch cannot be imported, what they hold, what they declare, and
that the installed wheel works. Nothing here needs a network."""

from __future__ import annotations

import configparser
import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
LIMIT = 10 * 2**20
TINY = ("config.json", "model.safetensors", "problems.jsonl", "tokenizer.json", "tokenizer_config.json")


class Built(NamedTuple):
    source: Path
    sdist: Path
    wheel: Path
    environment: dict[str, str]


def command(*arguments: str, cwd: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The sdist of a clean copy, and the wheel that pip builds from the unpacked sdist: what is missing from the first
    is missing from the second."""
    top = tmp_path_factory.mktemp("packaging")
    copy = top / "copy"
    hidden = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "shared")
    shutil.copytree(ROOT, copy, ignore=hidden)
    blocker = top / "blocker"
    for name in ("torch", "triton", "transformers", "numpy"):
        (blocker / name).mkdir(parents=True)
        (blocker / name / "__init__.py").write_text(f"raise ImportError('a build must not import {name}')\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LEAP_KERNELS_")}
    environment |= {"PYTHONPATH": str(blocker), "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INDEX": "1"}
    with pytest.raises(AssertionError, match="a build must not import torch"):
        command("-c", "import torch", cwd=top, environment=environment)

    hook = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    command("-c", hook, str(top / "sdist"), cwd=copy, environment=environment)
    (sdist,) = (top / "sdist").iterdir()
    with tarfile.open(sdist) as archive:
        archive.extractall(top / "unpacked", filter="data")
    (unpacked,) = (top / "unpacked").iterdir()
    flags = ("--no-deps", "--no-build-isolation", "--quiet")
    command("-m", "pip", "wheel", *flags, "--wheel-dir", str(top / "wheel"), ".", cwd=unpacked, environment=environment)
    (wheel,) = (top / "wheel").iterdir()
    return Built(copy, sdist, wheel, environment)


@pytest.fixture(scope="module")
def names(built: Built) -> list[str]:
    with zipfile.ZipFile(built.wheel) as archive:
        return archive.namelist()


@pytest.fixture(scope="module")
def metadata(built: Built, names: list[str]) -> Message:
    (path,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    with zipfile.ZipFile(built.wheel) as archive:
        return email.message_from_bytes(archive.read(path))


def version() -> str:
    return re.search(r'__version__ = "(.+)"', (ROOT / "leap_kernels" / "version.py").read_text()).group(1)


def test_wheel_is_pure_and_small(built: Built, names: list[str]) -> None:
    """One wheel for every platform and Python; the bundled model is the only thing with weight."""
    assert built.wheel.name == f"leap_kernels-{version()}-py3-none-any.whl"
    assert built.wheel.stat().st_size <= LIMIT
    assert built.sdist.stat().st_size <= LIMIT
    allowed = {"", ".py", ".json", ".jsonl", ".safetensors", ".typed", ".txt"}
    assert {Path(name).suffix for name in names} <= allowed


def test_wheel_holds_the_package_and_nothing_else(built: Built, names: list[str]) -> None:
    """Every module and data file of the package, its licence, and no tests, training programs or benchmarks."""
    tops = {name.split("/")[0] for name in names}
    assert tops == {"leap_kernels", f"leap_kernels-{version()}.dist-info"}
    package = built.source / "leap_kernels"
    wanted = {f"leap_kernels/{path.relative_to(package).as_posix()}" for path in package.rglob("*") if path.is_file()}
    shipped = {name for name in names if name.startswith("leap_kernels/")}
    assert {name for name in wanted if Path(name).suffix == ".py"} == {n for n in shipped if Path(n).suffix == ".py"}
    assert {"leap_kernels/py.typed", *(f"leap_kernels/models/tiny/{name}" for name in TINY)} <= shipped
    assert shipped <= wanted
    assert any(re.fullmatch(r"leap_kernels-.+\.dist-info/licenses/LICENSE", name) for name in names)


def test_sdist_holds_what_a_build_needs(built: Built) -> None:
    """Sources, those of the optional extension too, licence, readme and the bundled model; no caches."""
    with tarfile.open(built.sdist) as archive:
        members = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "README.md", "PKG-INFO", "leap_kernels/py.typed"} <= members
    assert {f"leap_kernels/models/tiny/{name}" for name in TINY} <= members
    extension = {path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").iterdir()}
    assert len(extension) >= 5
    assert {"setup.py", *extension} <= members
    assert not [name for name in members if re.search(r"__pycache__|\.pyc$|(^|/)\.(?!gitignore)", name)]


def test_core_metadata(metadata: Message) -> None:
    """Name, version, licence expression and file, Python range, description."""
    assert metadata["Name"] == "leap_kernels"
    assert metadata["Version"] == version()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert metadata["Requires-Python"] == ">=3.10"
    assert len(metadata["Summary"]) > 20
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    assert not [c for c in metadata.get_all("Classifier") if c.startswith("License ::")]


def test_dependencies_are_open_ranges(metadata: Message) -> None:
    """Lower bounds and nothing else: an upper pin blocks installation beside other packages. triton, which exists for
    Linux only, must not make an installation elsewhere fail."""
    found = {}
    for line in metadata.get_all("Requires-Dist"):
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        match = re.fullmatch(r"([A-Za-z0-9_.-]+)(\[\w+\])?(>=[\d.]+)?", requirement)
        assert match, f"{line!r} is not a name with a lower bound"
        if "extra ==" not in marker:
            found[match[1]] = (match[3], marker.replace('"', "'"))
    assert set(found) == {"torch", "triton", "transformers", "tokenizers", "safetensors", "rich"}
    assert found["torch"] == (">=2.11", "")
    assert found["triton"] == (">=3.6", "platform_system == 'Linux'")
    assert found["transformers"] == (">=5", "")
    assert all(bound for bound, _ in found.values())
    assert [name for name, (_, marker) in found.items() if marker] == ["triton"]
    assert set(metadata.get_all("Provides-Extra")) >= {"test", "dev"}


def test_entry_point(built: Built, names: list[str]) -> None:
    """`leap-kernels` is the only command, and what it points to is in the wheel."""
    (path,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
    parser = configparser.ConfigParser()
    with zipfile.ZipFile(built.wheel) as archive:
        parser.read_string(archive.read(path).decode())
    assert {section: dict(parser[section]) for section in parser.sections()} == {
        "console_scripts": {"leap-kernels": "leap_kernels.cli:main"}
    }
    assert "leap_kernels/cli.py" in names


def test_installed_wheel_works(built: Built, tmp_path: Path) -> None:
    """Installed elsewhere and imported from there: ops run, data files are found, and installing needed no torch."""
    target = tmp_path / "target"
    command(
        "-m", "pip", "install", "--no-deps", "--quiet", "--target", str(target), str(built.wheel),
        cwd=tmp_path, environment=built.environment,
    )  # fmt: skip
    code = """
import json, importlib.metadata
from importlib import resources
import torch
import leap_kernels
from leap_kernels import ops
print(json.dumps({
    "file": leap_kernels.__file__,
    "ids": ops.top_eta(torch.tensor([[0.0, 2.0, 2.0, -1.0]]), 0.2).ids[0].tolist(),
    "typed": resources.files("leap_kernels").joinpath("py.typed").is_file(),
    "parameters": sum(p.numel() for p in leap_kernels.load("tiny").parameters()),
    "version": importlib.metadata.distribution("leap_kernels").version,
}))
"""
    environment = {**os.environ, "PYTHONPATH": str(target), "HF_HUB_OFFLINE": "1"}
    seen = json.loads(command("-c", code, cwd=tmp_path, environment=environment))
    assert Path(seen["file"]).is_relative_to(target)
    assert seen["ids"] == [1, 2, -1, -1]
    assert seen["typed"]
    assert seen["parameters"] > 0
    assert seen["version"] == version()
