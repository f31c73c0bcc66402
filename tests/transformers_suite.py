"""Transformers' own test suite, brought here and made importable: `python -m tests.transformers_suite` fetches it.

The source distribution on PyPI carries the tests that every model passes, but not those of `generate()`. They are
imported under a package name of their own, with stand-ins for what is not there. Where the environment variable
TRANSFORMERS_SOURCE names a full checkout of the installed version, its tests are used, those of `generate()` too.
"""

import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import types
from pathlib import Path

VERSION = importlib.metadata.version("transformers")
UNPACKED = Path(__file__).resolve().parent.parent / ".transformers-tests" / f"transformers-{VERSION}"
PACKAGE = "transformers_own_tests"
SETUP = "python -m tests.transformers_suite"

# Values other than the defaults, for fields that every configuration has.
COMMON_CONFIG_FIELDS = {
    "return_dict": False,
    "output_hidden_states": True,
    "dtype": "float16",
    "tie_word_embeddings": False,
    "chunk_size_feed_forward": 5,
    "architectures": ["SomeModel"],
    "id2label": {0: "label"},
    "label2id": {"label": 0},
    "bos_token_id": 6,
    "pad_token_id": 7,
    "eos_token_id": 8,
    "decoder_start_token_id": 10,
    "problem_type": "regression",
}


def suite_folder() -> Path:
    """Where the tests of the installed Transformers are to be found."""
    return Path(os.environ.get("TRANSFORMERS_SOURCE") or UNPACKED) / "tests"


def is_there(folder: Path) -> bool:
    return (folder / "test_modeling_common.py").exists()


def marks() -> list[str]:
    """The marks that the imported files put on their tests."""
    files = [suite_folder() / "test_modeling_common.py", suite_folder() / "generation" / "test_utils.py"]
    texts = [path.read_text(encoding="utf-8") for path in files if path.exists()]
    own = {"filterwarnings", "parametrize", "skip", "skipif", "usefixtures", "xfail"}
    return sorted({name for text in texts for name in re.findall(r"@(?:pytest\.)?mark\.(\w+)", text)} - own)


def stand_in(name: str, **contents: object) -> types.ModuleType:
    """A module of that name which holds `contents`, and is a package without files."""
    module = types.ModuleType(name)
    module.__path__ = []
    vars(module).update(contents)
    sys.modules[name] = module
    return module


def load() -> types.SimpleNamespace:
    """ModelTesterMixin, GenerationTesterMixin (empty without a checkout), ConfigTester and `ids_tensor`.

    The tests of export are always stood in for: they need ONNX Runtime and ExecuTorch.
    """
    folder = suite_folder()
    if PACKAGE not in sys.modules:
        stand_in(PACKAGE).__path__ = [str(folder)]
        empty = {name: type(name, (), {}) for name in ("ExportTesterMixin", "ExportGenerateTesterMixin")}
        for package in (PACKAGE, "tests"):
            stand_in(f"{package}.exporters")
            stand_in(f"{package}.exporters.test_export", **empty)
        stand_in(f"{PACKAGE}.utils")
        stand_in(f"{PACKAGE}.utils.test_configuration_utils", config_common_kwargs=COMMON_CONFIG_FIELDS)
        if not (folder / "generation" / "test_utils.py").exists():
            stand_in(f"{PACKAGE}.generation")
            mixin = type("GenerationTesterMixin", (), {})
            stand_in(f"{PACKAGE}.generation.test_utils", GenerationTesterMixin=mixin)
    modeling = importlib.import_module(f"{PACKAGE}.test_modeling_common")
    configuration = importlib.import_module(f"{PACKAGE}.test_configuration_common")
    return types.SimpleNamespace(
        ModelTesterMixin=modeling.ModelTesterMixin,
        GenerationTesterMixin=modeling.GenerationTesterMixin,
        ConfigTester=configuration.ConfigTester,
        ids_tensor=modeling.ids_tensor,
    )


def fetch() -> None:
    """Download the source distribution of the installed Transformers and unpack its tests."""
    if is_there(UNPACKED / "tests"):
        print(f"{UNPACKED / 'tests'} is there already.")
        return
    UNPACKED.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=UNPACKED.parent) as temporary:
        requirement = f"transformers=={VERSION}"
        command = ["pip", "download", "--no-deps", "--no-binary", "transformers", "--dest", temporary, requirement]
        finished = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
        archives = list(Path(temporary).glob("transformers-*.tar.gz"))
        if finished.returncode or not archives:
            sys.exit(
                f"{finished.stdout}{finished.stderr}\nThe source distribution of {requirement} could not be had, "
                f"as said above. With a network run `{SETUP}` again, or set TRANSFORMERS_SOURCE to a checkout of it."
            )
        with tarfile.open(archives[0]) as archive:
            members = [member for member in archive if member.name.startswith(f"transformers-{VERSION}/tests/")]
            archive.extractall(temporary, members=members, filter="data")
        tests = Path(temporary) / f"transformers-{VERSION}" / "tests"
        (tests / "__init__.py").touch()  # as in a checkout
        tests.rename(UNPACKED / "tests")
    print(f"{UNPACKED / 'tests'} holds the tests of Transformers {VERSION}.")


if __name__ == "__main__":
    fetch()
