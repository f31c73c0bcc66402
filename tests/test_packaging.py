"""The distributions have their files, the installed wheel works, and the files for GitHub and pre-commit are valid."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from tests import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source distribution and the wheel of this checkout."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.mark.slow
def test_wheel_holds_the_package_and_works_where_it_is_installed(distributions: Path, tmp_path: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        description = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    assert {name.partition("/")[0] for name in names if "dist-info" not in name} == {"vaswani_transformer"}
    rooms = [ROOT / "vaswani_transformer" / room for room in ("demo", "figures")]
    scripts = {path.relative_to(ROOT).as_posix() for room in rooms for path in room.rglob("*.js")}
    page = {f"vaswani_transformer/figures/web/page.{suffix}" for suffix in ("html", "css", "js")}
    page.add("vaswani_transformer/demo/web/index.html")
    assert {"vaswani_transformer/demo/model/transformer.js", *scripts} - names == set()
    assert {"vaswani_transformer/py.typed", *page} <= names
    source = PROJECT["project"]["urls"]["Source"]  # PyPI's page has no files of the repository
    assert f"]({source}/blob/main/docs/results.md#tatoeba)" in description
    assert f"]({source}/raw/main/docs/images/figure-translation.svg)" in description
    assert not re.search(r"\]\((?!https://)", description.partition("# vaswani-transformer")[2])
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(tmp_path)]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PATH": path, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(ROOT / "tests" / "installed_wheel.py")]
    finished = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.slow
def test_source_distribution_holds_every_file_of_the_repository(distributions: Path) -> None:
    (path,) = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert set(listed.splitlines()) - held == set()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_only_reads_and_names_actions_by_commit(path: Path) -> None:
    assert yaml.safe_load(path.read_text(encoding="utf-8"))["permissions"] == {"contents": "read"}
    uses = re.findall(r"uses: (.*)", path.read_text(encoding="utf-8"))
    assert [each for each in uses if not re.fullmatch(r"\./\S+|[\w./-]+@[0-9a-f]{40}  # v[\d.]+", each)] == []


def test_release_needs_a_tag_and_stores_no_token() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    assert yaml.safe_load(text)[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as true
    assert "secrets." not in text
    assert "id-token: write" in text
