"""Prepare a public data set for the recipes: `python -m training.prepare NAME --output=FOLDER [--from=PATH]`.

It downloads the set's files to the cache of `datasets`, or reads a local copy, checks their SHA-256, cuts them by the
set's rule and writes the files that the recipes name, all of them or none. The same command resumes an interrupted one:
files in the cache are not downloaded again.
"""

import argparse
import gzip
import hashlib
import json
import zipfile
import zlib
from pathlib import Path
from typing import Any, cast

from datasets import DownloadConfig, DownloadManager

from training.data.sources import PREPARED, SOURCES, Files, Source, read_member
from training.run.command import flush_stdout
from vaswani_transformer.support.command_line import ArgumentParser
from vaswani_transformer.support.errors import UserError, exit_on_user_error, one_line
from vaswani_transformer.support.files import atomic_folder, read_errors, read_json, write_errors


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def digests(files: Files) -> dict[str, str]:
    return {name: sha256(content) for name, content in files.items()}


def download(source: Source, names: list[str], again: bool = False) -> Files:
    """Return the content of files of a source, from the cache where they are there."""
    config = DownloadConfig(use_etag=source.sums is None, force_download=again, max_retries=3)
    try:
        paths = DownloadManager(download_config=config).download([source.base + name for name in names])
    except Exception as error:  # any error of the libraries for the network
        raise UserError(
            f"{source.base}: cannot be downloaded ({one_line(error.__cause__ or error)}); try again, or "
            f"give a local copy of {source.page} by --from."
        ) from error
    return {name: Path(path).read_bytes() for name, path in zip(names, paths, strict=True)}


def read_archive(archive: Path, names: list[str]) -> Files:
    """Return the content of files in an archive of a repository, which has all of them in one folder."""
    try:
        with read_errors(archive), zipfile.ZipFile(archive) as opened:
            folder = opened.namelist()[0].partition("/")[0]
            return {name: read_member(opened, f"{folder}/{name}") for name in names}
    except (zipfile.BadZipFile, KeyError, IndexError) as error:
        raise UserError(f"--from={archive}: not a complete archive: {one_line(error)}; give another copy.") from error


def read_copy(copy: Path, names: list[str]) -> Files:
    """Return the content of files in a local copy: a folder, its archive, or the only file."""
    if [copy.name] == names:
        copy = copy.parent
    elif copy.suffix == ".zip":
        return read_archive(copy, names)
    files: Files = {}
    for name in names:
        with read_errors(copy / name):
            files[name] = (copy / name).read_bytes()
    return files


def read_source(source: Source, copy: Path | None) -> Files:
    """Return the content of a source's files, checked."""
    expected = source.expected
    names = list(expected)
    files = download(source, names) if copy is None else read_copy(copy, names)
    changed = [name for name in names if expected[name] not in (None, sha256(files[name]))]
    if changed and copy is None:  # the cache may be damaged
        files |= download(source, changed, again=True)
    for name in changed:
        if (digest := sha256(files[name])) != expected[name]:
            raise UserError(
                f"{source.base if copy is None else f'--from={copy}: '}{name}: the file is not the one that the set is "
                f"made from; got SHA-256 {digest}, expected {expected[name]}. Give a copy of that one by --from."
            )
    return files


def text_digest(path: Path) -> str:
    """Return the SHA-256 of a compressed file's text, which no version of zlib changes."""
    try:
        with gzip.open(path) as file:
            return hashlib.file_digest(cast(Any, file), "sha256").hexdigest()
    except (EOFError, zlib.error) as error:
        raise UserError(f"{path}: is damaged ({error}); name a new folder.") from error


def check_output(folder: Path, record: dict[str, Any]) -> bool:
    """Return whether a folder has the set of a record already."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    if not (folder / PREPARED).is_file():
        raise UserError(f"--output={folder}: is in use and has no {PREPARED}; name a new folder.")
    earlier = read_json(folder / PREPARED, "name a new folder.", name=str, sources=dict, files=dict)
    if earlier["name"] != record["name"]:
        raise UserError(f"--output={folder}: has {earlier['name']}, expected {record['name']}; name a new folder.")
    with read_errors(folder):
        on_disk = {name: text_digest(folder / name) for name in earlier["files"]}
    for what, before, now in (
        ("was made from another", earlier["sources"], record["sources"]),
        ("has another", on_disk, record["files"]),
    ):
        for name, digest in now.items():
            if digest != before.get(name):
                raise UserError(
                    f"--output={folder}: {what} {name}; got SHA-256 {before.get(name)}, expected {digest}. Name a new "
                    "folder."
                )
    return True


def write_set(folder: Path, texts: dict[str, bytes], licenses: Files, record: dict[str, Any]) -> None:
    """Write the files of a set, compressed, all of them or none."""
    with write_errors(f"--output={folder}", "name a folder that can be written"), atomic_folder(folder) as staging:
        for name, text in texts.items():
            (staging / name).write_bytes(gzip.compress(text, mtime=0))
        for name, text in licenses.items():
            (staging / name).write_bytes(text)
        (staging / PREPARED).write_text(f"{json.dumps(record, indent=2)}\n", encoding="utf-8")


def prepare(name: str, output: Path, copy: Path | None) -> None:
    """Write a set, and print where it comes from and what was written."""
    source = SOURCES[name]
    files = read_source(source, copy)
    lines = {f"{file}.gz": rows for file, rows in source.cut(files).items()}
    texts = {file: "".join(f"{row}\n" for row in rows).encode() for file, rows in lines.items()}
    record: dict[str, Any] = {"name": name, "page": source.page, "license": source.license, "rule": source.rule}
    record |= {"sources": digests(files), "files": digests(texts)}
    is_done = check_output(output, record)
    if not is_done:
        write_set(output, texts, {file: text for file, text in files.items() if file.startswith("LICENSE")}, record)
    print(f"source   {source.page}\nlicense  {source.license}\nrule     {source.rule}")
    if source.sums is None:
        print(
            f"archive  {source.file} changes over time, so none is expected; got SHA-256 {sha256(files[source.file])}"
        )
    print(f"{'exists' if is_done else 'wrote':<8} {output}")
    for file, rows in lines.items():
        print(f"         {file:<20} {len(rows):>7,} lines, SHA-256 of the text {sha256(texts[file])}")


def main(arguments: list[str] | None = None) -> None:
    parser = ArgumentParser(
        prog="python -m training.prepare",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Download a public data set, check it and cut it into the files that the recipes name.",
        epilog="\n".join(f"{name:<20}{source.page}" for name, source in SOURCES.items()),
    )
    parser.add_argument("name", metavar="NAME", choices=SOURCES, help="one of the sets below")
    parser.add_argument("--output", type=Path, metavar="FOLDER", required=True, help="a new folder for the files")
    parser.add_argument(
        "--from", dest="copy", type=Path, metavar="PATH", help="a clone or archive of the source; nothing is downloaded"
    )
    options = parser.parse_args(arguments)
    with (
        exit_on_user_error(OSError, what_now="; the same command resumes, with the files that were downloaded"),
        flush_stdout(f"what it wrote is in {options.output}"),
    ):
        prepare(options.name, options.output, options.copy)


if __name__ == "__main__":
    main()
