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

# In reading order: a file imports only from files above it.
PUBLISHED = [
    *("config", "dropout", "embeddings", "window", "attention", "layers", "tokenizer", "pipeline", "pretrained"),
    *("encoder", "decoder", "loss", "body", "search", "generation_settings", "generation", "model"),
    *("lengths", "relative", "parallel", "parallel_head", "parallel_generation", "masking", "nat"),
    *("latent", "iterative_vae", "flow", "flowseq", "cmlm"),
]
# Never published, in the same order; they import from published files too.
SHARED = [
    *("interrupts", "errors", "files", "modes", "command_line", "saved_settings", "checked_loading", "schedule"),
]
# Never published either: the folders that each folder imports from, beyond published and shared files.
ROOMS = {
    "batching": set(),
    "cpu": set(),
    "convert": {"translate"},
    "figures": set(),
    "parse": {"figures", "translate"},
    "translate": {"cpu"},
}

# The folders and files of training/ that each of its folders imports from. The files import from every folder.
TRAINING_ROOMS = {
    "toy_task": set(),
    "tasks": set(),
    "monitor": {"kinds", "tasks"},
    "data": {"recipe", "tasks", "toy_task"},
    "report": {"data", "kinds", "monitor", "recipe", "recipe_reading", "tasks"},
}

ALLOWED_PACKAGES = {"huggingface_hub", "tokenizers", "torch", "transformers"} | sys.stdlib_module_names
# The pattern by which Transformers' loader finds imports of sibling files, anywhere in the text.
LOADER_IMPORT = re.compile(r"^\s*(?:from\s+\.(\S+)\s+import|import\s+\.(\S+)\s*$)", re.MULTILINE)


def existing(names: list[str]) -> list[str]:
    return [name for name in names if (PACKAGE / f"{name}.py").is_file()]


def flat_files() -> set[str]:
    return {path.stem for path in PACKAGE.glob("*.py")}


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


@pytest.mark.parametrize("name", existing(PUBLISHED))
def test_published_file_imports_only_from_those_above_it(name: str) -> None:
    assert imported_units(PACKAGE / f"{name}.py") <= set(PUBLISHED[: PUBLISHED.index(name)])


@pytest.mark.parametrize("name", existing(PUBLISHED))
def test_published_file_imports_in_the_form_that_the_loader_finds(name: str) -> None:
    path = PACKAGE / f"{name}.py"
    nodes = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ImportFrom) and node.level]
    assert all(node.level == 1 and node.module and "." not in node.module for node in nodes)
    matches = LOADER_IMPORT.findall(path.read_text(encoding="utf-8"))
    assert {one or other for one, other in matches} == imported_units(path)


@pytest.mark.parametrize("name", existing(PUBLISHED))
def test_published_file_needs_no_further_package(name: str) -> None:
    assert absolute_imports(PACKAGE / f"{name}.py") <= ALLOWED_PACKAGES


@pytest.mark.parametrize("name", existing(SHARED))
def test_shared_file_imports_only_from_published_files_and_those_above_it(name: str) -> None:
    above = {*PUBLISHED, *SHARED[: SHARED.index(name)]}
    assert imported_units(PACKAGE / f"{name}.py") <= above


@pytest.mark.parametrize("room", [room for room in ROOMS if (PACKAGE / room).is_dir()])
def test_room_imports_only_from_flat_files_and_the_rooms_it_may(room: str) -> None:
    allowed = {*PUBLISHED, *SHARED, *ROOMS[room], room}
    for path in (PACKAGE / room).rglob("*.py"):
        assert imported_units(path) <= allowed, path


@pytest.mark.parametrize("room", [room for room in ROOMS if (PACKAGE / room).is_dir()])
def test_files_of_a_room_import_each_other_in_one_direction(room: str) -> None:
    graph = {(room, path.stem): relative_imports(path) for path in (PACKAGE / room).glob("*.py")}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError
    assert set(graph) <= set(order)


def test_registration_imports_only_published_files() -> None:
    assert imported_units(PACKAGE / "registration.py") <= set(PUBLISHED)


def test_every_file_and_folder_of_the_package_has_its_layer() -> None:
    assert flat_files() <= {*PUBLISHED, *SHARED, "__init__", "registration"}
    assert {path.parent.name for path in PACKAGE.glob("*/*.py")} <= set(ROOMS)
    assert not list(PACKAGE.glob("*/*/*.py"))


def test_package_imports_neither_training_nor_tests() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert not absolute_imports(path) & {"training", "tests", "vaswani_transformer"}, path


@pytest.mark.parametrize("room", TRAINING_ROOMS)
def test_room_of_training_imports_only_from_those_it_may(room: str) -> None:
    for path in (TRAINING / room).rglob("*.py"):
        assert {module.split(".")[0] for module in training_imports(path)} <= {*TRAINING_ROOMS[room], room}, path


def test_files_of_training_import_each_other_in_one_direction() -> None:
    paths = {path.relative_to(TRAINING).with_suffix("").as_posix(): path for path in TRAINING.rglob("*.py")}
    graph = {name.replace("/", ".").removesuffix(".__init__"): training_imports(path) for name, path in paths.items()}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError
    assert set(graph) <= set(order)


def test_training_imports_no_test_and_every_folder_of_it_has_its_layer() -> None:
    assert not [path for path in TRAINING.rglob("*.py") if "tests" in absolute_imports(path)]
    assert {path.parent.name for path in TRAINING.glob("*/*.py")} == set(TRAINING_ROOMS)


def test_folders_of_tests_mirror_those_of_the_code() -> None:
    folders = {path.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("*") if path.is_dir()}
    assert ROOMS.keys() | {f"training/{room}" for room in TRAINING_ROOMS} <= folders


def test_architecture_page_names_every_module_and_folder() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## Published code")[0]
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("|")]
    named = {word.strip(" `/") for row in rows for word in row.split(",")}
    modules = {path.stem for folder in (PACKAGE, TRAINING) for path in folder.glob("*.py")} - {"__init__"}
    assert {*modules, *ROOMS, *TRAINING_ROOMS} == named - {"modules", "---", ""}


@pytest.mark.parametrize(("family", "make"), [("transformer", tiny_model), *FAMILY.items()], ids=PUBLISHED_FILES)
def test_published_model_carries_exactly_the_files_of_its_family(
    family: str, make: Callable[..., Any], tmp_path: Path
) -> None:
    make().with_remote_code().save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob("*.py")} == PUBLISHED_FILES[family]
    assert PUBLISHED_FILES[family] <= {f"{name}.py" for name in PUBLISHED}


def test_published_tokenizer_carries_its_own_file(tmp_path: Path) -> None:
    model_of_pairs()[1].with_remote_code().save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob("*.py")} == {"tokenizer.py"}
