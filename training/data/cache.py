"""Pairs and their tokens on disk: written once to the cache folder of `datasets`, mapped by every rank and later run.

HF_DATASETS_CACHE/vaswani_transformer/KEY/   KEY: of the texts, the tokenizer and the settings
    complete.json           the files with their bytes, written last
    pairs.arrow             texts, or
    00000_*_of_*.arrow      token ids of a million pairs, by each process that tokenized them
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Generator, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import datasets.config
import pyarrow as pa
from datasets import Dataset, Features, List, Value
from filelock import FileLock

from vaswani_transformer import __version__
from vaswani_transformer.support.errors import UserError
from vaswani_transformer.support.files import PARTIAL, digest_of_file, write_atomically, write_errors

logger = logging.getLogger(__name__)
RECORD = "complete.json"
CACHED_BYTES = 2**24  # smaller files are read again in every run
BATCH = 1000  # pairs that are written together
PART = 1_000_000  # pairs, of which a killed run loses at most these
PAIRS_A_PROCESS = 10_000  # fewer are tokenized before another process has started
FIX = "free some space, or name another folder by the environment variable HF_DATASETS_CACHE"


def cache_folder(*key: Any) -> Path | None:
    """Return the folder of what `key` decides; None where nothing can be written."""
    name = hashlib.sha256(json.dumps([__version__, *key], sort_keys=True).encode()).hexdigest()[:32]
    folder = Path(datasets.config.HF_DATASETS_CACHE).expanduser() / "vaswani_transformer" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) or is_complete(folder) else None


def is_complete(folder: Path) -> bool:
    """Return whether a folder has all its files, each of the size that it was written with."""
    try:
        sizes = json.loads((folder / RECORD).read_text(encoding="utf-8"))["bytes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


@contextlib.contextmanager
def writing(folder: Path) -> Generator[bool]:
    """Yield whether a folder must still be written, by this process only; a failed write becomes one line."""
    if is_complete(folder):
        yield False
        return
    with write_errors(folder, FIX), FileLock(f"{folder}.lock"):  # another run may write it now
        yield not is_complete(folder)


def complete(folder: Path, what: str) -> None:
    """Record the files of a folder, and log their size."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.glob("*.arrow"))}
    write_atomically(folder / RECORD, json.dumps({"bytes": sizes}))
    logger.info("%s: %.2f GB in %s, which later runs use.", what, sum(sizes.values()) / 1e9, folder)


def check_space(folder: Path, needed: int, what: str) -> None:
    """Check that a disk has room, before any time is lost."""
    if (free := shutil.disk_usage(folder).free) < needed:
        raise UserError(
            f"{folder}: the disk is too full for {what}; got {free / 1e9:.2f} GB free, expected about "
            f"{needed / 1e9:.2f} GB. F{FIX[1:]}."
        )


def cached_pairs(read: Callable[[], Iterator[tuple[str, str]]], files: list[Path], *key: Any) -> Dataset | None:
    """Return the pairs of large files, read once; None if they are small, or where nothing can be written.

    None also stands for files that cannot be read: `read` raises the error.
    """
    try:
        if sum(path.stat().st_size for path in files) < CACHED_BYTES:
            return None
        digests = [digest_of_file(path) for path in files]
    except OSError:
        return None
    if (folder := cache_folder(digests, key)) is None:
        return None
    path = folder / "pairs.arrow"
    with writing(folder) as is_missing:
        if is_missing:
            check_space(folder, sum(file.stat().st_size for file in files), "the pairs")
            partial = path.with_name(f"{path.name}{PARTIAL}")
            with pa.OSFile(str(partial), "wb") as file:
                write_pairs(file, read())
            partial.replace(path)
            complete(folder, "Pairs")
    return Dataset.from_file(str(path))


def write_pairs(file: Any, pairs: Iterator[tuple[str, str]]) -> None:
    schema = pa.schema([("source", pa.string()), ("target", pa.string())])
    with pa.ipc.new_stream(file, schema) as writer:
        while chunk := list(islice(pairs, BATCH)):
            writer.write_batch(pa.record_batch([pa.array(side) for side in zip(*chunk, strict=True)], schema))


def map_tokens(pairs: Dataset, encode: Callable, columns: list[str], key: str) -> Dataset:
    """Return pairs as token ids: those of a data set on disk once for all runs, by all cores."""
    ids = {name: List(Value("int32")) for name in ("input_ids", "labels")}
    kept = {name: feature for name, feature in pairs.features.items() if name not in columns}
    settings: dict[str, Any] = {"batched": True, "remove_columns": columns, "desc": "Tokenizing"}
    settings["features"] = Features(kept | ids)
    folder = cache_folder(pairs._fingerprint, columns, key) if pairs.cache_files else None
    if folder is None:
        name = f"{pairs._fingerprint[:16]}{key[:16]}"
        return pairs.map(encode, **settings, keep_in_memory=True, new_fingerprint=name)
    with writing(folder) as is_missing:
        if is_missing:
            written = sum(path.stat().st_size for path in folder.glob("*.arrow"))  # by a killed run
            check_space(folder, pairs.data.nbytes - written, "the tokens")
            logger.info("Writing the tokens of %s pairs to %s.", f"{len(pairs):,d}", folder)
            if (folder / RECORD).exists():  # a file is damaged
                shutil.rmtree(folder)
                folder.mkdir()
        parts = [map_part(pairs, number, folder, encode, settings) for number in range(-(-len(pairs) // PART))]
        if is_missing:
            for temporary in folder.glob("tmp*"):  # of a killed run
                temporary.unlink()
            complete(folder, "Tokens")
    return datasets.concatenate_datasets(parts)


def map_part(pairs: Dataset, number: int, folder: Path, encode: Callable, settings: dict[str, Any]) -> Dataset:
    """Return the tokens of a part, by all cores if it has not been tokenized yet."""
    part = pairs.select(range(number * PART, min((number + 1) * PART, len(pairs))))
    processes = min(num_cores(), len(part) // PAIRS_A_PROCESS)
    return part.map(
        encode,
        **settings,
        num_proc=processes if processes > 1 else None,
        cache_file_name=str(folder / f"{number:05d}.arrow"),
        load_from_cache_file=True,
        new_fingerprint=f"{folder.name}-{number}",
    )


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
