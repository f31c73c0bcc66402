"""Every tree of a treebank on this machine is restored from its linear tree, complete and as evaluation counts it."""

import gzip
import os
from pathlib import Path

import pytest

from vaswani_transformer.parsing import delinearize, evaluation_tree, linearize, read_trees

TREEBANK = os.environ.get("TREEBANK")


@pytest.mark.slow
@pytest.mark.skipif(TREEBANK is None, reason="no treebank may be shipped; set TREEBANK to a folder of bracketed files")
def test_every_tree_of_the_treebank_is_lossless() -> None:
    paths = [path for ending in ("*.ptb", "*.mrg", "*.gz") for path in sorted(Path(str(TREEBANK)).rglob(ending))]
    assert paths
    count = 0
    for path in paths:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        for line, tree in read_trees(enumerate(text.decode("utf-8-sig").splitlines(), start=1), str(path)):
            assert list(read_trees([(line, str(tree))], str(path))) == [(line, tree)]
            for form in (tree, evaluation_tree(tree)):
                assert form is None or delinearize(linearize(form), form.words) == (form, False), f"{path}, line {line}"
            count += 1
    print(f"{count} trees of {len(paths)} files")
