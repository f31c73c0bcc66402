"""Transformers' own test suite, fetched once by the test set-up and made importable.

The source distribution on PyPI carries the tests that every model passes, but not those of `generate()`. They are
imported under a separate package name, with stand-ins for missing modules. If the environment variable
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
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor
from transformers import PreTrainedConfig

VERSION = importlib.metadata.version("transformers")
UNPACKED = Path(__file__).resolve().parent.parent / ".transformers-tests" / f"transformers-{VERSION}"
PACKAGE = "transformers_own_tests"

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
    """Return the folder for the tests of the installed Transformers."""
    return Path(os.environ.get("TRANSFORMERS_SOURCE") or UNPACKED) / "tests"


def is_there() -> bool:
    return (suite_folder() / "test_modeling_common.py").exists()


def marks() -> list[str]:
    """Return the marks that the imported files put on their tests."""
    files = [suite_folder() / "test_modeling_common.py", suite_folder() / "generation" / "test_utils.py"]
    texts = [path.read_text(encoding="utf-8") for path in files if path.exists()]
    known = {"filterwarnings", "parametrize", "skip", "skipif", "usefixtures", "xfail"}
    return sorted({name for text in texts for name in re.findall(r"@(?:pytest\.)?mark\.(\w+)", text)} - known)


def stand_in(name: str, **contents: Any) -> types.ModuleType:
    """Register a module of that name that holds `contents`, as a package without files."""
    module = types.ModuleType(name)
    module.__path__ = []
    vars(module).update(contents)
    sys.modules[name] = module
    return module


def load() -> types.SimpleNamespace:
    """Return ModelTesterMixin, GenerationTesterMixin (None without a checkout) and ConfigTester.

    The tests of export are always replaced by stand-ins: they need ONNX Runtime and ExecuTorch.
    """
    folder = suite_folder()
    has_generation_tests = (folder / "generation" / "test_utils.py").exists()
    if PACKAGE not in sys.modules:
        stand_in(PACKAGE).__path__ = [str(folder)]
        empty = {name: type(name, (), {}) for name in ("ExportTesterMixin", "ExportGenerateTesterMixin")}
        for package in (PACKAGE, "tests"):
            stand_in(f"{package}.exporters")
            stand_in(f"{package}.exporters.test_export", **empty)
        stand_in(f"{PACKAGE}.utils")
        stand_in(f"{PACKAGE}.utils.test_configuration_utils", config_common_kwargs=COMMON_CONFIG_FIELDS)
        if not has_generation_tests:  # the tests of models import the mixin's name
            stand_in(f"{PACKAGE}.generation")
            mixin = type("GenerationTesterMixin", (), {})
            stand_in(f"{PACKAGE}.generation.test_utils", GenerationTesterMixin=mixin)
    modeling = importlib.import_module(f"{PACKAGE}.test_modeling_common")
    configuration = importlib.import_module(f"{PACKAGE}.test_configuration_common")
    return types.SimpleNamespace(
        ModelTesterMixin=modeling.ModelTesterMixin,
        GenerationTesterMixin=modeling.GenerationTesterMixin if has_generation_tests else None,
        ConfigTester=configuration.ConfigTester,
    )


class TinyModels:
    """The sizes and inputs that the suite needs from a model's tester."""

    batch_size = 13
    seq_length = encoder_seq_length = decoder_seq_length = key_length = 7
    is_training = True
    vocab_size = 99
    hidden_size = 32
    num_hidden_layers = 2
    num_attention_heads = 4
    bos_token_id, pad_token_id, eos_token_id = 0, 1, 2

    def __init__(self, config: PreTrainedConfig, reads_targets: bool) -> None:
        """Make a tester; the targets of a model that reads none have the lengths of `decoder_attention_mask`."""
        self.config, self.reads_targets = config, reads_targets

    def get_config(self) -> PreTrainedConfig:
        return type(self.config).from_dict(self.config.to_dict())

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict[str, Tensor]]:
        source = torch.randint(4, self.vocab_size, (self.batch_size, self.seq_length))
        source[:, -1] = self.eos_token_id
        ones = torch.ones_like(source)
        inputs = {"input_ids": source, "attention_mask": ones, "decoder_attention_mask": ones}
        if self.reads_targets:
            inputs["decoder_input_ids"] = torch.randint(self.vocab_size, source.shape)
        return self.get_config(), inputs

    prepare_config_and_inputs = prepare_config_and_inputs_for_common


def fetch_once() -> None:
    """Fetch the tests of the installed Transformers from PyPI if they are missing, in only one of several processes.

    Without a network they stay missing.
    """
    if is_there() or "TRANSFORMERS_SOURCE" in os.environ:
        return
    UNPACKED.mkdir(parents=True, exist_ok=True)
    with FileLock(UNPACKED / "lock"), tempfile.TemporaryDirectory(dir=UNPACKED.parent) as temporary:
        if is_there():
            return
        options = ["--no-deps", "--no-binary", "transformers", "--retries", "1", "--dest", temporary]
        command = [sys.executable, "-m", "pip", "download", *options, f"transformers=={VERSION}"]
        subprocess.run(command, capture_output=True, timeout=300)
        for path in Path(temporary).glob("transformers-*.tar.gz"):
            with tarfile.open(path) as archive:
                members = [member for member in archive if member.name.startswith(f"transformers-{VERSION}/tests/")]
                archive.extractall(temporary, members=members, filter="data")
            tests = Path(temporary) / f"transformers-{VERSION}" / "tests"
            (tests / "__init__.py").touch()  # as in a checkout
            tests.rename(UNPACKED / "tests")
