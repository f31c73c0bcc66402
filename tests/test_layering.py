"""The plan: which file and folder of the package and of training/ imports which, and what a published model carries."""

import ast
import re
import sys
from collections.abc import Callable
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT, model_of_pairs, tiny_model
from tests.nar_models import FAMILY
from tests.published import PUBLISHED_FILES

PACKAGE = ROOT / "vaswani_transformer"
TRAINING = ROOT / "training"

PLAN = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## Published code")[0]
"""Its three tables: the flat files in reading order, the folders of the package, the files of training/."""


def names_in_table(number: int) -> list[str]:
    """Return the names in the first column of one of the plan's tables, in their order."""
    tables = [[line for line in block.splitlines() if line.startswith("| ")] for block in PLAN.split("\n\n")]
    rows = [table for table in tables if table][number][2:]
    return [name.strip(" `/") for row in rows for name in row.split("|")[1].split(",")]


PUBLISHED, PACKAGE_FOLDERS, TRAINING_PARTS = (names_in_table(number) for number in range(3))
# The folders that each folder of the package imports from, beyond published files and support.
ROOMS = {
    "support": set(),
    "batching": set(),
    "cpu": set(),
    "convert": {"translation"},
    "figures": set(),
    "demo": {"figures", "parsing", "translation"},
    "parsing": {"figures", "translation"},
    "translation": {"cpu"},
}

ALLOWED_PACKAGES = {"huggingface_hub", "tokenizers", "torch", "transformers"} | sys.stdlib_module_names
# The pattern by which Transformers' loader finds imports of sibling files, anywhere in the text.
LOADER_IMPORT = re.compile(r"^\s*(?:from\s+\.(\S+)\s+import|import\s+\.(\S+)\s*$)", re.MULTILINE)


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def absolute_imports(path: Path) -> set[str]:
    """Return the top-level packages that a file imports at any depth."""
    nodes = list(ast.walk(tree_of(path)))
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level and node.module]
    return {module.split(".")[0] for module in modules}


def relative_imports(path: Path) -> set[tuple[str, ...]]:
    """Return the modules of the package that a file imports at any depth, as paths from the package."""
    folder = path.relative_to(PACKAGE).parent.parts
    modules = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = folder[: len(folder) - node.level + 1]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            modules |= {(*base, *name.split(".")) for name in names}
    return modules


def training_imports(path: Path) -> set[str]:
    """Return the modules of training/ that a file imports at any depth, without the folder's own name."""
    nodes = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ImportFrom) and not node.level]
    modules = {node.module or "" for node in nodes}
    return {module.removeprefix("training.") for module in modules if module.startswith("training.")}


def imported_units(path: Path) -> set[str]:
    """Return the names of the flat files and the folders that a file imports."""
    return {module[0] for module in relative_imports(path)}


def test_published_files_import_only_from_those_above_them_in_the_form_that_the_loader_finds() -> None:
    """They need no further package either."""
    for number, name in enumerate(PUBLISHED):
        path = PACKAGE / f"{name}.py"
        assert imported_units(path) <= set(PUBLISHED[:number]), path
        nodes = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ImportFrom) and node.level]
        assert all(node.level == 1 and node.module and "." not in node.module for node in nodes), path
        matches = LOADER_IMPORT.findall(path.read_text(encoding="utf-8"))
        assert {one or other for one, other in matches} == imported_units(path), path
        assert absolute_imports(path) <= ALLOWED_PACKAGES, path


@pytest.mark.parametrize("room", ROOMS)
def test_room_imports_only_from_published_files_and_the_rooms_it_may(room: str) -> None:
    allowed = {*PUBLISHED, *ROOMS[room], "support", room}
    for path in (PACKAGE / room).rglob("*.py"):
        assert imported_units(path) <= allowed, path


@pytest.mark.parametrize("room", ROOMS)
def test_files_of_a_room_import_each_other_in_one_direction(room: str) -> None:
    graph = {(room, path.stem): relative_imports(path) for path in (PACKAGE / room).glob("*.py")}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError
    assert set(graph) <= set(order)


def test_registration_imports_only_published_files() -> None:
    assert imported_units(PACKAGE / "registration.py") <= set(PUBLISHED)


def test_plan_names_every_file_and_folder() -> None:
    flat = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "registration"}
    assert sorted(PUBLISHED) == sorted(flat)
    assert {f"{name}.py" for name in flat} == set().union(*PUBLISHED_FILES.values())
    assert sorted(PACKAGE_FOLDERS) == sorted({path.parent.name for path in PACKAGE.glob("*/*.py")}) == sorted(ROOMS)
    commands = {path.stem for path in TRAINING.glob("*.py")} - {"__init__"}
    assert sorted(TRAINING_PARTS) == sorted(commands)
    assert not [*PACKAGE.glob("*/*/*.py"), *TRAINING.glob("*/*.py")]


def test_package_imports_neither_training_nor_tests() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert not absolute_imports(path) & {"training", "tests", "vaswani_transformer"}, path


def test_files_of_training_import_each_other_in_one_direction() -> None:
    paths = {path.relative_to(TRAINING).with_suffix("").as_posix(): path for path in TRAINING.rglob("*.py")}
    graph = {name.replace("/", ".").removesuffix(".__init__"): training_imports(path) for name, path in paths.items()}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError
    assert set(graph) <= set(order)


def test_training_imports_no_test() -> None:
    assert not [path for path in TRAINING.rglob("*.py") if "tests" in absolute_imports(path)]


def test_folders_of_tests_mirror_those_of_the_code() -> None:
    folders = {path.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("*") if path.is_dir()}
    assert set(ROOMS) <= folders


@pytest.mark.parametrize(("family", "make"), [("transformer", tiny_model), *FAMILY.items()], ids=PUBLISHED_FILES)
def test_published_model_carries_exactly_the_files_of_its_family(
    family: str, make: Callable[..., Any], tmp_path: Path
) -> None:
    make().with_remote_code().save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob("*.py")} == PUBLISHED_FILES[family]


def test_published_tokenizer_carries_its_own_file(tmp_path: Path) -> None:
    model_of_pairs()[1].with_remote_code().save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob("*.py")} == {"tokenizer.py"}
