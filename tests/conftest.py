"""One thread, one seed and no network for every test."""

import gc
import os
import tempfile
from collections.abc import Generator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of each worker, and of the processes that tests start
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # more are processes, each of which imports torch
# One for each worker: a cache that two fill at once can lack a file that the other has begun
os.environ["TORCHINDUCTOR_CACHE_DIR"] = "-".join(
    [
        os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor-tests"),
        os.environ.get("PYTEST_XDIST_WORKER", "main"),
    ]
)

import pytest
import torch
from hypothesis import settings

from tests.models import model_of_pairs, save
from tests.transformers_suite import fetch_once, marks
from vaswani_transformer.cpu.linear import timed_layouts

torch.set_num_threads(1)
gc.disable()  # until the test modules are imported

# The same examples on every run; no deadline, since the first example of a test pays for what torch sets up.
settings.register_profile("vaswani_transformer", deadline=None, derandomize=True, max_examples=50)
# Hostile input at scale: `pytest --hypothesis-profile=campaign` tries other examples at each run, for hours.
settings.register_profile("campaign", deadline=None, max_examples=100_000)
settings.load_profile("vaswani_transformer")


# The files that take longest, in order: the workers of pytest-xdist begin with them, and end at about the same time.
LONGEST = (
    "test_dialect_language.py",
    "training/test_train.py",
    "test_docs.py",
    "test_bench.py",
    "test_promises.py",
    "test_examples.py",
    "test_transformers_suite.py",
    "convert/test_onnx_exporter.py",
    "test_compile_export.py",
    "test_paper_page.py",
    "training/test_publish.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Keep pytest-xdist from beginning with the files that have most tests."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {Path(__file__).parent / name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


def pytest_collection_finish() -> None:
    """Search what imports and parameters made no more for garbage, which took a twentieth of the tests' time."""
    gc.freeze()
    gc.enable()


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Fetch Transformers' test suite and register its marks before it is imported, but not for other files."""
    if isinstance(collector, pytest.Module) and collector.path.name == "test_transformers_suite.py":
        fetch_once()
        for mark in marks():
            collector.config.addinivalue_line("markers", f"{mark}: set by Transformers' own test suite")


@pytest.fixture(autouse=True)
def seed() -> int:
    """Give each test the same random numbers on the CPU, whatever ran before it.

    `torch.manual_seed` would also format the stack, for the devices that are not yet in use.
    """
    torch.default_generator.manual_seed(0)
    return 0


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the model of pairs with its tokenizer."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    save(folder, *model_of_pairs())
    return folder


@pytest.fixture
def no_layouts() -> Generator[None]:
    """Begin without a timed layout, and restore those of before."""
    before = dict(timed_layouts)
    timed_layouts.clear()
    yield
    timed_layouts.clear()
    timed_layouts.update(before)
