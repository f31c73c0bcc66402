"""Every name that `vaswani_transformer` exports exists, is documented, and costs nothing before its first use."""

import inspect

import pytest

import vaswani_transformer
from tests.helpers import run_python

OPTIONAL = (
    "matplotlib",
    "ctranslate2",
    "vaswani_transformer.figures",
    "vaswani_transformer.convert",
)


@pytest.mark.parametrize("name", sorted(set(vaswani_transformer.__all__) - {"translate"}))
def test_public_name_is_importable_and_documented(name: str) -> None:
    assert inspect.getdoc(getattr(vaswani_transformer, name))


@pytest.mark.slow
def test_fresh_process_imports_no_optional_dependency_and_gets_every_public_name_by_a_star_import() -> None:
    code = f"""
import sys, vaswani_transformer
print([name for name in {OPTIONAL!r} if name in sys.modules])
from vaswani_transformer import *
print(translate.__name__, draw_loss.__name__, to_ctranslate2.__name__)
"""
    assert run_python(code) == "[]\ntranslate draw_loss to_ctranslate2\n"


def test_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(vaswani_transformer, "no_such_name")
    assert set(vaswani_transformer.__all__) <= set(dir(vaswani_transformer))
