"""Prepare a public data set for the recipes: `python -m training.prepare NAME --output=FOLDER [--from=PATH]`.

The command downloads the files to the cache of `datasets`, or reads a local copy, checks their SHA-256, splits them and
writes the files that the recipes name.
"""

import argparse
import csv
import gzip
import hashlib
import io
import json
import re
import unicodedata
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from pathlib import Path

import yaml
from datasets import DownloadConfig, DownloadManager

from training.texts import draw_key
from vaswani_transformer.parsing.trees import ROOT, Tree, read_trees
from vaswani_transformer.support.command import CommandParser, UserError, exit_on_user_error, one_line
from vaswani_transformer.support.files import atomic_folder, read_json

SUMS = Path(__file__).parent / "sums"
PREPARED = "prepared.json"
"""File in a prepared folder with its source and the SHA-256 of its files."""
HELD_OUT = 3000  # pairs of Tatoeba in validation and in test
DIALOGUE_PAIRS = {"test": 12_516, "validation": 7_326}  # target sizes in Self-dialogue, with a tolerance of 2%
DIALOGUE_EXCESS = 1.02
STRIDE = 4  # every fourth constituent of GUM is also a tree
GUM_SPLITS = {"train": "train", "dev": "validation", "test": "test", "test2": "test2"}
EMPTY_ANSWERS = {"", "{}"}  # in Self-dialogue

NEWLINE = b"\n"

Files = dict[str, bytes]
"""Content of a source's files, by name."""
Lines = dict[str, list[str]]
"""Lines of each file of a prepared data set, by name."""


@dataclass(frozen=True)
class Source:
    """Public data set, described in `sums/sources.yaml`.

    cut: function that makes the prepared files.
    sums: file in the format of `sha256sum` with the set's files; None for a single file whose content changes.
    file: name of that single file.
    """

    page: str
    license: str
    base: str
    rule: str
    cut: Callable[[Files], Lines]
    sums: Path | None
    file: str = ""
    hub: str | None = None

    @property
    def expected(self) -> dict[str, str | None]:
        """SHA-256 of each file by name; None if the content changes."""
        if self.sums is None:
            return {self.file: None}
        rows = (line.split(maxsplit=1) for line in self.sums.read_text(encoding="utf-8").splitlines())
        return {name: digest for digest, name in rows}


def text_of(content: bytes) -> str:
    """Return the text of a file, decompressed if necessary."""
    return (gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content).decode("utf-8-sig")


def json_lines(pairs: Iterable[dict[str, str]]) -> list[str]:
    """Return pairs as JSON Lines in the schema of Hugging Face translation data sets."""
    return [json.dumps({"translation": pair}, ensure_ascii=False) for pair in pairs]


def cut_multi30k(files: Files, names: str) -> Lines:
    """Return the published split of three languages; `names` contains `{split}` and `{language}`."""
    lines = {}
    for split, theirs in (("train", "train"), ("validation", "val"), ("test", "test_2016_flickr")):
        texts: dict[str, list[str]] = {}
        for language in ("en", "de", "fr"):
            content = files[names.format(split=theirs, language=language)]
            texts[language] = text_of(content).removesuffix("\n").split("\n")
        rows = zip(*texts.values(), strict=True)
        lines[f"{split}.jsonl"] = json_lines(dict(zip(texts, row, strict=True)) for row in rows)
    return lines


def cut_tatoeba(files: Files) -> Lines:
    """Draw test and validation from the distinct pairs whose sentences occur once; all others are train, in order."""
    text = zipfile.ZipFile(io.BytesIO(files["deu-eng.zip"])).read("deu.txt").decode("utf-8-sig")
    distinct: dict[tuple[str, str], None] = {}  # in the order of the file
    for line in text.split("\n"):
        if line.strip():
            english, german, *_ = line.split("\t")
            distinct[" ".join(english.split()), " ".join(german.split())] = None
    pairs = list(distinct)

    # The SHA-256 of the English sentence decides the split, so the order of the file does not.
    english_counts = Counter(english for english, _ in pairs)
    german_counts = Counter(german for _, german in pairs)
    single = [pair for pair in pairs if english_counts[pair[0]] == 1 and german_counts[pair[1]] == 1]
    single.sort(key=lambda pair: draw_key(pair[0]))
    held_out = set(single[: 2 * HELD_OUT])
    splits = {
        "train": [pair for pair in pairs if pair not in held_out],
        "test": single[:HELD_OUT],
        "validation": single[HELD_OUT : 2 * HELD_OUT],
    }
    lines = {}
    for split, chosen in splits.items():
        lines[f"{split}.jsonl"] = json_lines({"en": english, "de": german} for english, german in chosen)
    return lines


def constituents(trees: Iterable[str]) -> Iterator[str]:
    """Yield the constituents with two or more words, but not all words, from left to right."""
    for _, tree in read_trees(enumerate(trees, start=1), "GUM"):
        words = len(tree.words)
        for event, node in tree.events():
            if event == "open" and isinstance(node, Tree) and 2 <= len(node.words) < words:
                yield str(Tree(ROOT, (node,)))


def cut_gum(files: Files) -> Lines:
    """Return the trees of each official split, one per line, and some constituents of the training trees."""
    lines: Lines = {}
    split = ""
    for line in text_of(files["splits.md"]).splitlines():
        if line.startswith("## "):
            split = f"{GUM_SPLITS[line[3:].strip()]}.ptb"
            lines[split] = []
        elif (name := line.strip().removeprefix("* ")).startswith(("GUM_", "GENTLE_")) and "_reddit_" not in name:
            trees = re.split(r"\n\s*\n", text_of(files[f"const/{name}.ptb"]))
            lines[split] += [" ".join(tree.split()) for tree in trees if tree.strip()]
    lines["constituents.ptb"] = list(islice(constituents(lines["train.ptb"]), 0, None, STRIDE))
    return lines


def dialogue_pairs(files: Files) -> dict[str, list[tuple[str, str]]]:
    """Return the pairs of a turn and its reply for each valid worker of Self-dialogue."""
    blocked = set(text_of(files["blocked_workers.txt"]).split())
    pairs: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(name for name in files if name.endswith(".csv")):
        for row in csv.DictReader(io.StringIO(text_of(files[name]), newline="")):
            worker = row["WorkerId"]
            if worker in blocked or row["Reject"] or row["AssignmentStatus"] == "Rejected":
                continue
            count = sum((key or "").startswith("Answer.sentence") for key in row)
            turns = [visible_text(row[f"Answer.sentence{number}"] or "") for number in range(1, count + 1)]
            replies = (pair for pair in pairwise(turns) if EMPTY_ANSWERS.isdisjoint(pair))
            pairs.setdefault(worker, []).extend(replies)
    return pairs


def visible_text(text: str) -> str:
    """Return a text without zero-width characters, with single spaces between words."""
    visible = "".join(character for character in text if unicodedata.category(character) != "Cf")
    return " ".join(visible.split())


def cut_self_dialogue(files: Files) -> Lines:
    """Assign workers, ordered by the SHA-256 of their ids, to test until it is full, then validation, then train."""
    by_worker = dialogue_pairs(files)
    counts = dict.fromkeys(("test", "validation", "train"), 0)
    splits: dict[str, dict[tuple[str, str], None]] = {split: {} for split in ("train", "validation", "test")}
    for worker in sorted(by_worker, key=lambda worker: hashlib.sha256(worker.encode()).hexdigest()):
        size = len(by_worker[worker])
        chosen = "train"
        for split, target_size in DIALOGUE_PAIRS.items():
            if counts[split] < target_size and counts[split] + size <= DIALOGUE_EXCESS * target_size:
                chosen = split
                break
        counts[chosen] += size
        splits[chosen].update(dict.fromkeys(by_worker[worker]))

    # A pair that several workers wrote is only in the first of their splits.
    known: set[tuple[str, str]] = set()
    lines = {}
    for split, pairs in splits.items():
        new = [pair for pair in pairs if pair not in known]
        known.update(new)
        lines[f"{split}.jsonl"] = json_lines({"prompt": prompt, "reply": reply} for prompt, reply in new)
    return lines


CUTS: dict[str, Callable[[Files], Lines]] = {
    "multi30k": partial(cut_multi30k, names="data/task1/raw/{split}.{language}.gz"),
    "multi30k-tokenized": partial(cut_multi30k, names="data/task1/tok/{split}.lc.norm.tok.{language}"),
    "tatoeba-en-de": cut_tatoeba,
    "gum": cut_gum,
    "self-dialogue": cut_self_dialogue,
}
PUBLIC_SETS: dict[str, dict[str, str]] = yaml.safe_load((SUMS / "sources.yaml").read_text(encoding="utf-8"))
"""Page, license and more of each public data set by name, also of the shipped one, which needs no preparation."""
SOURCES = {
    name: Source(**fields, cut=CUTS[name], sums=None if "file" in fields else SUMS / f"{name}.sha256")
    for name, fields in PUBLIC_SETS.items()
    if name in CUTS
}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def download(source: Source, names: list[str], again: bool = False) -> Files:
    """Return the content of a source's files, from the cache if possible."""
    config = DownloadConfig(use_etag=source.sums is None, force_download=again, max_retries=3)
    try:
        paths = DownloadManager(download_config=config).download([source.base + name for name in names])
    except Exception as error:  # any error of the network libraries
        raise UserError(
            f"{source.base}: cannot be downloaded ({one_line(error.__cause__ or error)}); try again, or "
            f"pass a local copy of {source.page} as --from."
        ) from error
    return {name: Path(path).read_bytes() for name, path in zip(names, paths, strict=True)}


def read_source(source: Source, copy: Path | None) -> Files:
    """Return the content of a source's files, checked."""
    expected = source.expected
    names = list(expected)

    # Files that are cached, downloaded or copied.
    try:
        if copy is None:
            files = download(source, names)
        else:
            folder = copy.parent if [copy.name] == names else copy  # the set may be a single file
            files = {name: (folder / name).read_bytes() for name in names}
    except OSError as error:
        raise UserError(
            f"--from={copy}: is not a complete copy of {source.page} ({one_line(error)}); choose a different one."
        ) from error

    # A changed file may be a damaged one of the cache.
    changed = [name for name in names if expected[name] not in (None, sha256(files[name]))]
    if changed and copy is None:
        files.update(download(source, changed, again=True))
    for name in changed:
        if (digest := sha256(files[name])) != expected[name]:
            raise UserError(
                f"{copy or source.base}: {name} is not the file that the set is made from; got SHA-256 {digest}, "
                f"expected {expected[name]}. Pass a copy of the expected file as --from."
            )
    return files


def prepare(name: str, output: Path, copy: Path | None) -> None:
    """Write a data set, and print its source and the written files."""
    source = SOURCES[name]
    files = read_source(source, copy)
    texts = {f"{file}.gz": "".join(f"{row}\n" for row in rows).encode() for file, rows in source.cut(files).items()}
    sources = {file: sha256(content) for file, content in files.items()}
    digests = {file: sha256(text) for file, text in texts.items()}
    record: dict[str, object] = {
        "name": name,
        "page": source.page,
        "license": source.license,
        "rule": source.rule,
        "sources": sources,
        "files": digests,
    }

    # The folder is written once, completely or not at all.
    is_done = (output / PREPARED).is_file()
    if is_done and read_json(output / PREPARED, "choose a new folder.") != record:
        raise UserError(f"--output={output}: already contains a different data set; choose a new folder.")
    if not is_done:
        with atomic_folder(output) as staging:
            for file, text in texts.items():
                (staging / file).write_bytes(gzip.compress(text, mtime=0))
            for file in (file for file in files if file.startswith("LICENSE")):
                (staging / file).write_bytes(files[file])
            (staging / PREPARED).write_text(f"{json.dumps(record, indent=2)}\n", encoding="utf-8")

    print(f"source   {source.page}\nlicense  {source.license}\nrule     {source.rule}")
    if source.sums is None:
        print(f"archive  {source.file} changes over time; got SHA-256 {sources[source.file]}")
    print(f"{'exists' if is_done else 'wrote':<8} {output}")
    for file, text in texts.items():
        print(f"         {file:<20} {text.count(NEWLINE):>7,} lines, SHA-256 of the text {digests[file]}")


def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser(
        prog="python -m training.prepare",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Download a public data set, check it and split it into the files that the recipes name.",
        epilog="\n".join(f"{name:<20}{source.page}" for name, source in SOURCES.items()),
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", choices=SOURCES, help="one of the data sets below")
    parser.add_argument("--output", type=Path, metavar="FOLDER", required=True, help="a new folder for the files")
    parser.add_argument(
        "--from", dest="copy", type=Path, metavar="PATH", help="a local copy of the source; nothing is downloaded"
    )
    options = parser.parse_args(arguments)
    what_now = "; the same command resumes, with the files that were downloaded"
    with exit_on_user_error(OSError, zipfile.BadZipFile, zlib.error, what_now=what_now):
        prepare(options.name, options.output, options.copy)


if __name__ == "__main__":
    main()
