"""The command that prepares public data sets: from a download or a local copy, complete or not at all."""

import dataclasses
import gzip
import io
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from datasets import DownloadConfig

from tests.commands import Finished, Run, error_line, run_main
from training import prepare
from training.recipe import FileData, Recipe
from training.texts import read_split, tree_rows

Copy = Callable[[str], Path]  # makes a local copy of a source; returns its folder
COLUMNS = "AssignmentStatus,WorkerId,Answer.sentence1,Answer.sentence2,Answer.sentence3,Approve,Reject\n"
SPLITS = (("train", "train"), ("val", "validation"), ("test_2016_flickr", "test"))


def tatoeba_archive(rows: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("deu.txt", rows)
    return content.getvalue()


MULTI30K = {"multi30k": "data/task1/raw/{}.{}.gz", "multi30k-tokenized": "data/task1/tok/{}.lc.norm.tok.{}"}
FILES = {
    name: {
        pattern.format(split, language): gzip.compress(f"{language} {split} one \n{split} two\n".encode())
        for split, _ in SPLITS
        for language in ("en", "de", "fr")
    }
    for name, pattern in MULTI30K.items()
} | {
    "tatoeba-en-de": {
        "deu-eng.zip": tatoeba_archive(
            "Hi.\tHallo!\tCC\nHi.\tServus!\tCC\nRun!\tLauf!\tCC\nGo.\tGeh.\tCC\nHi.\tHallo!\tCC\n"
        )
    },
    "gum": {
        "LICENSE.txt": b"a license",
        "splits.md": b"# S\n\n## dev\n\n  * GUM_bio_a\n  * GUM_reddit_b\n\n## train\n\n  * GUM_bio_c\n  * GENTLE_d\n",
        "const/GUM_bio_a.ptb": b"(ROOT\n  (NP (NN dog)))\n\n(ROOT\n  (X\n    (. !)))\n",
        "const/GUM_bio_c.ptb": b"(ROOT (NP (NN cat)))\n",
        "const/GENTLE_d.ptb": b"(ROOT (NP (NN cow)))\n",
    },
    "self-dialogue": {
        "LICENSE": b"a license",
        "blocked_workers.txt": b"B\n",
        "corpus/a/1.csv": f"{COLUMNS}Approved,A,Hi.,  Hello\u200b  there,{{}},,\nApproved,B,no,no,no,,\n".encode(),
        "corpus/b/1.csv": (
            f"{COLUMNS}Rejected,C,no,no,no,,\nApproved,C,no,no,no,,x\nApproved,C,Hi.,Hello there,Ok,,\n".encode()
        ),
    },
}  # fmt: skip
"""Small files in the format of each source."""


@pytest.fixture(autouse=True)
def small_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Replace the files of each source by the small ones, and the sizes of splits."""
    monkeypatch.setattr(prepare, "HELD_OUT", 1)
    monkeypatch.setattr(prepare, "DIALOGUE_PAIRS", {"test": 1, "validation": 1})
    for name, source in prepare.SOURCES.items():
        if source.sums is not None:
            path = tmp_path / f"{name}.sha256"
            path.write_text("".join(f"{prepare.sha256(data)}  {file}\n" for file, data in FILES[name].items()))
            monkeypatch.setitem(prepare.SOURCES, name, dataclasses.replace(source, sums=path))


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that prepares a set in the folder `set`, and returns output, errors and status."""

    def run(name: str, *options: str) -> Finished:
        return run_main(prepare.main, [name, f"--output={tmp_path / 'set'}", *options], capsys)

    return run


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """Return a function that writes a local copy of a source."""

    def write(name: str) -> Path:
        for file, content in FILES[name].items():
            (tmp_path / "copy" / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "copy" / file).write_bytes(content)
        return tmp_path / "copy"

    return write


@pytest.fixture
def prepared(run: Run, copy: Copy, tmp_path: Path) -> Copy:
    """Return a function that prepares a set from a local copy, and returns its folder."""

    def prepared(name: str) -> Path:
        assert run(name, f"--from={copy(name)}")[2] == 0
        return tmp_path / "set"

    return prepared


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, copy: Copy) -> Path:
    """Let `datasets` download Multi30k from a folder, which is returned; only a forced download passes its cache."""
    served = copy("multi30k")

    class Downloads:
        def __init__(self, download_config: DownloadConfig) -> None:
            self.force = download_config.force_download

        def download(self, urls: list[str]) -> list[Path]:
            cached = {url: served / url.replace("/", "-") for url in urls}
            for url, path in cached.items():
                if self.force or not path.exists():
                    shutil.copy(served / url.removeprefix("https://here/"), path)
            return list(cached.values())

    source = dataclasses.replace(prepare.SOURCES["multi30k"], base="https://here/")
    monkeypatch.setitem(prepare.SOURCES, "multi30k", source)
    monkeypatch.setattr(prepare, "DownloadManager", Downloads)
    return served


def pairs(
    folder: Path, source: str, target: str, splits: tuple[str, ...] = ("train", "validation", "test")
) -> dict[str, list[tuple[str, str]]]:
    recipe = Recipe(data=FileData(path=str(folder), source=source, target=target))
    rows = {name: read_split(recipe.data, name, f"{name}.jsonl.gz") for name in splits}
    return {name: list(zip(of["source"], of["target"], strict=True)) for name, of in rows.items()}


@pytest.mark.parametrize("name", MULTI30K)
def test_multi30k_has_the_published_split_in_three_languages(name: str, prepared: Copy) -> None:
    folder = prepared(name)
    for target in ("de", "fr"):
        assert pairs(folder, "en", target) == {
            ours: [(f"en {theirs} one", f"{target} {theirs} one"), *[(f"{theirs} two",) * 2]] for theirs, ours in SPLITS
        }


def test_no_sentence_of_tatoeba_is_in_two_splits(prepared: Copy) -> None:
    split = pairs(prepared("tatoeba-en-de"), "en", "de")
    assert split["train"] == [("Hi.", "Hallo!"), ("Hi.", "Servus!")]
    assert sorted(split["validation"] + split["test"]) == [("Go.", "Geh."), ("Run!", "Lauf!")]


def test_gum_has_the_documents_of_its_splits_without_reddit(prepared: Copy) -> None:
    folder = prepared("gum")
    sentences = [
        [row[1] for row in tree_rows(folder / f"{split}.ptb.gz", FileData())] for split in ("train", "validation")
    ]
    assert sentences == [["cat", "cow"], ["dog", "!"]]
    assert (folder / "LICENSE.txt").read_bytes() == b"a license"


def test_constituents_are_those_of_two_words_or_more_below_the_whole_sentence() -> None:
    tree = "(ROOT (S (NP (DT the) (NN dog)) (VP (VBD saw) (NP-OBJ (DT a) (NN cat)))))"
    assert list(prepare.constituents([tree, "(ROOT (NP (NN cow)))"])) == [
        "(TOP (NP (DT the) (NN dog)))",
        "(TOP (VP (VBD saw) (NP-OBJ (DT a) (NN cat))))",
        "(TOP (NP-OBJ (DT a) (NN cat)))",
    ]


def test_every_fourth_constituent_of_gum_s_training_trees_is_a_tree_of_its_own() -> None:
    pairs = "".join(f"(NP (DT the) (NN n{number}))" for number in range(9))
    files = {"const/GUM_bio_c.ptb": f"(ROOT (S {pairs}))\n".encode()}
    lines = prepare.cut_gum(FILES["gum"] | files)
    assert lines["constituents.ptb"] == [f"(TOP (NP (DT the) (NN n{number})))" for number in (0, 4, 8)]


def test_self_dialogue_has_no_worker_in_two_splits_and_each_pair_once(prepared: Copy) -> None:
    folder = prepared("self-dialogue")
    # A's only pair fits the test set of one pair, but C, who does not fit, has it in train too.
    assert pairs(folder, "prompt", "reply", ("train",))["train"] == [("Hi.", "Hello there"), ("Hello there", "Ok")]
    assert [gzip.decompress((folder / f"{name}.jsonl.gz").read_bytes()) for name in ("validation", "test")] == [b""] * 2


def test_failed_download_leaves_nothing_and_a_finished_folder_stays(server: Path, run: Run, tmp_path: Path) -> None:
    missing, folder = server / list(FILES["multi30k"])[-1], tmp_path / "set"
    missing.rename(tmp_path / "elsewhere")
    line = error_line(run("multi30k"))
    assert "cannot be downloaded" in line
    assert line.endswith("or pass a local copy of https://github.com/multi30k/dataset as --from.\n")
    assert not folder.exists()
    (tmp_path / "elsewhere").rename(missing)
    assert "wrote " in run("multi30k")[0]
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert "exists " in run("multi30k")[0]
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_changed_file_is_one_error_with_both_sums(server: Path, run: Run) -> None:
    name = "data/task1/raw/val.de.gz"
    (server / name).write_bytes(b"changed")
    got, expected = (prepare.sha256(content) for content in (b"changed", FILES["multi30k"][name]))
    start = f"https://here/: {name} is not the file that the set is made from; got SHA-256 {got}, expected {expected}."
    assert error_line(run("multi30k")).startswith(start)
    (server / name).write_bytes(FILES["multi30k"][name])  # the cache still has the other one
    assert run("multi30k")[2] == 0


def test_another_archive_of_a_set_that_changes_is_no_silent_replacement(copy: Copy, run: Run) -> None:
    archive = copy("tatoeba-en-de") / "deu-eng.zip"
    digest = prepare.sha256(archive.read_bytes())
    assert f"deu-eng.zip changes over time; got SHA-256 {digest}" in run("tatoeba-en-de", f"--from={archive}")[0]
    archive.write_bytes(tatoeba_archive("A.\tB.\tCC\n"))
    line = error_line(run("tatoeba-en-de", f"--from={archive}"))
    assert "already contains a different data set; choose a new folder." in line


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda copy: (copy / "const" / "GUM_bio_c.ptb").unlink(),
            r"--from=.*: is not a complete copy of .*GUM_bio_c\.ptb: No such file or directory",
        ),
        (
            lambda copy: (copy / "splits.md").write_bytes(b"## dev\n"),
            r"splits\.md is not the file that the set is made from; got SHA-256 ",
        ),
        (
            lambda copy: (copy.parent / "set" / "mine").mkdir(parents=True),
            r"set: the folder is in use; choose",
        ),
    ],
    ids=["an incomplete copy", "a changed copy", "a folder in use"],
)
def test_invalid_copy_or_folder_is_one_line(
    spoil: Callable[[Path], object], message: str, copy: Copy, run: Run
) -> None:
    spoil(folder := copy("gum"))
    assert re.search(message, error_line(run("gum", f"--from={folder}")))
