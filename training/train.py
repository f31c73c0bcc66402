"""Train a model from a recipe: `python -m training.train RECIPE.yaml [--any.field=value]`, or `accelerate launch -m`.

The command writes the trained model, its tokenizer, the recipe, `results.json`, the translations of the test set,
TensorBoard's files and checkpoints to `output_dir`. The same command resumes an interrupted run.
"""

import contextlib
import gzip
import hashlib
import json
import logging
import os
import re
import shlex
import sys
import time
import zlib
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
from accelerate import PartialState
from filelock import FileLock, Timeout
from transformers import set_seed
from transformers.utils.logging import disable_progress_bar

from training.checkpoints import CHECKPOINTS, changed_file, last_checkpoint
from training.data import Data, describe_seen, load_data
from training.evaluation import write_translations
from training.machine import commit, hardware, init_processes, versions
from training.models import DATA, RECIPE, learned_pairs, make_model, start_licenses, starts
from training.prepare import PREPARED
from training.recipe import Recipe, load_recipe, read_yaml, recipe_of, recipe_parser, to_dict, to_yaml
from training.tasks import make_task
from training.texts import find_folder
from training.trainer import PaperTrainer
from vaswani_transformer.support.command import UserError, exit_on_user_error
from vaswani_transformer.support.files import read_json, sha256_of, staged_files, write_atomically, write_errors

logger = logging.getLogger(__name__)
RESULTS = "results.json"
LOCK = ".lock"
TRANSLATIONS = "translations.jsonl"
TOKENIZER = "tokenizer"  # in data.json, next to the splits
RESTORE = "restore it, or choose a different --output_dir."
# Fields that may change when a run resumes.
FREE = {
    *("name", "expected", "published", "note", "data.path", "data.distilled", "score.examples"),
    *("training.steps", "training.minutes", "training.device_tokens", "training.evaluation_batch_size"),
    *("training.log_steps", "training.report_to", "training.gradient_checkpointing"),
}


def run(recipe: Recipe) -> dict[str, Any]:
    """Run a recipe, write results.json and return its content."""
    start = time.perf_counter()
    init_processes()
    source = prepared_name(recipe)
    with open_run(recipe) as folder:
        checkpoint = last_checkpoint(folder)
        with PartialState().main_process_first():  # others read its cache
            before = learned_pairs(starts(recipe).values(), recipe)
        data = load_data(recipe, folder if (folder / RECIPE).exists() else None, before)
        # A model that cannot be loaded must not leave a folder that only the same command may use.
        model = make_model(recipe, data.tokenizer, is_new=checkpoint is None)
        begin_run(recipe, folder, data)
        trainer = recipe.family.recipe.make_trainer(recipe, model, data, folder)
        trainer.train_or_resume(checkpoint)
        remove_results(folder)
        steps = trainer.save_final_model()
        results = final_results(trainer, steps, source)
        results["seconds"] = trainer.progress.seconds + time.perf_counter() - start
        write_results(trainer, results)
        return results


@contextlib.contextmanager
def open_run(recipe: Recipe) -> Generator[Path]:
    """Yield the locked folder of a new run, or of one with the same recipe to resume."""
    if not recipe.output_dir:
        raise UserError("output_dir: a run needs a folder; set --output_dir=runs/NAME.")
    folder = Path(recipe.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        if PartialState().is_main_process:
            lock.acquire()
    except Timeout as error:
        raise UserError(
            f"{folder}: a training command is already running there; stop it, or choose a different --output_dir."
        ) from error
    try:
        check_same_run(recipe, folder)
        yield folder
    finally:
        lock.release()


def flat(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted names and values of a nested dictionary."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def check_same_run(recipe: Recipe, folder: Path) -> None:
    """Check that a folder is new, or has an unfinished run of the same recipe with its tokenizer."""
    if not (folder / RECIPE).exists() and not (folder / CHECKPOINTS).exists():
        has_begun = isinstance(recorded(folder, TOKENIZER, None), dict)  # killed before it wrote its recipe
        if not has_begun and any(path.name != LOCK and path.suffix != ".part" for path in folder.iterdir()):
            raise UserError(f"{folder}: contains files that are not a run; choose a different --output_dir.")
        return

    check_same_recipe(recipe, folder)
    check_unfinished(recipe, folder)
    tokenizer = recorded(folder, TOKENIZER, {})
    if not isinstance(tokenizer, dict):
        raise damaged_record(folder, TOKENIZER, tokenizer)
    if problem := changed_file(folder, tokenizer):
        raise UserError(f"{folder}: {problem}; {RESTORE}")


def check_same_recipe(recipe: Recipe, folder: Path) -> None:
    """Check that a recipe differs from that of a folder's run only in fields that a resumed run may change."""
    try:
        saved = recipe_of(read_yaml(folder / RECIPE))
    except UserError as error:
        raise UserError(f"{folder / RECIPE}: does not fit this version, or is damaged ({error}); {RESTORE}") from error
    before = dict(flat(to_dict(saved)))
    now = dict(flat(to_dict(recipe)))
    for name in sorted((before.keys() | now.keys()) - FREE):
        if before.get(name) != now.get(name):
            raise UserError(
                f"{folder}: contains a run with a different {name}; got {now.get(name)}, expected "
                f"{before.get(name)}. Rerun the original command to resume it, or choose a different --output_dir."
            )


def check_unfinished(recipe: Recipe, folder: Path) -> None:
    """Check that a folder has no results, or that the limits which ended its run are raised."""
    if not (folder / RESULTS).exists():
        return
    fix = "restore or remove it."
    results = read_json(folder / RESULTS, fix)
    try:
        limits = results["recipe"]["training"]
        steps = int(limits["steps"])
        done = int(results.get("steps", steps))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / RESULTS}: is damaged; it names no training.steps; {fix}") from error

    # More steps extend a run; one that its time limit ended also needs more time.
    minutes = limits.get("minutes")
    ended_by_time = minutes is not None and limits.get("patience") is None and done < steps
    is_raised = recipe.training.steps > steps
    if ended_by_time:
        is_raised &= recipe.training.minutes is None or recipe.training.minutes > minutes
    if not is_raised:
        names = "training.steps and training.minutes" if ended_by_time else "training.steps"
        raise UserError(
            f"{folder}: contains a finished run; choose a different --output_dir, or raise {names} to train it further."
        )


def recorded(folder: Path, name: str, default: object) -> object:
    """Return what a run recorded in data.json when it began, or `default`."""
    record = read_json(folder / DATA, RESTORE) if (folder / DATA).exists() else {}
    return record.get(name, default)


def damaged_record(folder: Path, name: str, value: object) -> UserError:
    return UserError(f"{folder / DATA}: is damaged; got {value!r} for {name}; {RESTORE}")


def begin_run(recipe: Recipe, folder: Path, data: Data) -> None:
    """Check that a resumed run has its pairs; write the recipe, and in a new run fingerprints and tokenizer."""
    for split, fingerprint in data.fingerprints.items():
        expected = recorded(folder, split, fingerprint)
        if not isinstance(expected, dict) or not isinstance(expected.get("pairs"), int):
            raise damaged_record(folder, split, expected)
        if expected != fingerprint:
            raise UserError(
                f"data.{split}: differs from the data that the run in {folder} was started with "
                f"({expected['pairs']:,} pairs then, {fingerprint['pairs']:,} now); restore the data, or choose a "
                "different --output_dir."
            )
    PartialState().wait_for_everyone()
    if PartialState().is_main_process:
        with write_errors(folder, "make room, or choose a different --output_dir"):
            if not (folder / RECIPE).exists():
                write_data(folder, data)
            write_atomically(folder / RECIPE, to_yaml(to_dict(recipe)))
    PartialState().wait_for_everyone()


def write_data(folder: Path, data: Data) -> None:
    """Write the tokenizer of a new run, after data.json with the fingerprints of its pairs and tokenizer files."""
    with staged_files(folder) as staging:
        data.tokenizer.save_pretrained(staging)
        digests = {path.name: sha256_of(path) for path in sorted(staging.iterdir()) if path.is_file()}
        record = {**data.fingerprints, "variants": data.variants, TOKENIZER: digests}
        write_atomically(folder / DATA, json.dumps(record, indent=2))


def remove_results(folder: Path) -> None:
    """Remove the results of an earlier model, which the next one replaces."""
    if PartialState().is_main_process:
        for name in (RESULTS, TRANSLATIONS):
            (folder / name).unlink(missing_ok=True)


def final_results(trainer: PaperTrainer, averaged: list[int], source: str | None) -> dict[str, Any]:
    """Return the content of results.json, after decoding validation and test set; all processes must call this."""
    recipe = trainer.recipe
    state = trainer.state
    data = trainer.data
    results = {
        "name": recipe.name,
        "recipe": without_folders(to_dict(recipe)),
        "data": data.fingerprints,
        "tokens": data.unknown,
        "seen_in_training": data.seen,
        "source": source,
        "start_licenses": start_licenses(recipe),
        "commit": commit(),
        "versions": versions(),
        "hardware": hardware(trainer.args.device),
        "processes": trainer.args.world_size,
        "parameters": trainer.model.num_parameters(),
        "steps": state.global_step,
        **({} if recipe.training.average_last is None else {"averaged_steps": averaged}),
        "flops": state.total_flos,
        f"best_validation_{trainer.task.selection.key}": state.best_metric,
        "curve": [entry for entry in state.log_history if "loss" in entry or "eval_loss" in entry],
        "validation": trainer.translate_split("validation", trainer.search).scores,
    }
    if "test" in data.pairs:
        results["test"] = test_scores(trainer)
    return results


def write_results(trainer: PaperTrainer, results: dict[str, Any]) -> None:
    """Write results.json in the main process."""
    if trainer.is_world_process_zero():
        with write_errors(trainer.run / RESULTS, "make room, and the same command resumes the run"):
            write_atomically(trainer.run / RESULTS, json.dumps(results, indent=2, ensure_ascii=False))


def prepared_name(recipe: Recipe) -> str | None:
    """Return the name of the public data set that `training.prepare` wrote to the files of a run, if it did."""
    folder = find_folder(recipe.data)
    if folder is None or not (folder / PREPARED).is_file():
        return None
    record = read_json(folder / PREPARED, "repeat training.prepare.")
    digests = record.get("files")
    data = recipe.data
    named = [*([data.train] if isinstance(data.train, str) else data.train), data.validation, data.test]
    files = [name for name in named if isinstance(name, str)]
    if digests is not None and not all(has_text(folder / name, digests.get(name)) for name in files):
        return None
    return record.get("name")


def has_text(path: Path, digest: str | None) -> bool:
    """Return whether the SHA-256 of the text in a compressed file is `digest`."""
    if digest is None:
        return False
    try:
        with gzip.open(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == digest
    except (OSError, EOFError, zlib.error):  # missing, or not as it was written
        return False


def has_known_data(recipe: Recipe, arguments: list[str]) -> bool:
    """Return whether a run trains on the data that its recipe names, or on a public set of `training.prepare`.

    On data of one's own the `expected` score of a shipped recipe would mislead.
    """
    changes_path = any(argument.partition("=")[0] == "--data.path" for argument in arguments)
    return not changes_path or prepared_name(recipe) is not None


def without_folders(tree: Any) -> Any:
    """Replace local paths in a recipe's values by their last component."""
    if isinstance(tree, dict):
        return {name: without_folders(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [without_folders(value) for value in tree]
    if not isinstance(tree, str):
        return tree
    if tree.startswith((".", "/", "~")) or ("/" in tree and os.path.exists(tree)):
        return Path(tree).resolve().name
    return re.sub(r"(?<!\S)[~.]*/\S*/", "", tree)  # paths among other words


def test_scores(trainer: PaperTrainer) -> dict[str, Any]:
    """Return the task's metrics on the test set with the recipe's search, and a few example sentences.

    The main process writes all translations into the run's folder.
    """
    start = time.perf_counter()
    recipe = trainer.recipe
    task = trainer.task
    pairs = trainer.data.pairs["test"]
    set_seed(recipe.seed)  # for FlowSeq's latents
    search = recipe.generation_config(trainer.model.config, trainer.processing_class)
    logger.info("Translating the %s sentences of the test set.", f"{len(pairs):,}")
    pair_results, scores = trainer.translate_split("test", search, log_probabilities=True)
    references = pairs["target"][:]
    if trainer.is_world_process_zero():
        with write_errors(trainer.run / TRANSLATIONS, "make room, and the same command resumes the run"):
            write_translations(trainer.run / TRANSLATIONS, pair_results, pairs["source"][:], references)
    hypotheses = [result.hypothesis.text for result in pair_results]
    scores.update(task.scores(hypotheses, references, *task.metrics, *task.more_metrics))
    scores.update(task.statistics(hypotheses, references))
    seconds = time.perf_counter() - start

    # A few examples, evenly spaced over the test set.
    count = min(recipe.score.examples, len(pairs))
    examples = []
    for row in [index * len(pairs) // count for index in range(count)]:
        source = pairs[row]["source"]
        target = pairs[row]["target"]
        translation, reference = (task.display(source, text) for text in (hypotheses[row], target))
        examples.append({"source": source, "translation": translation, "reference": reference})
    return {**scores, "sentences": len(pairs), "seconds": seconds, "examples": examples}


def report(results: dict[str, Any], recipe: Recipe) -> None:
    """Print a few translations, the time and, on the last line, the best metric; log the next commands."""
    scores = results.get("test")
    minutes = results["seconds"] / 60
    task = make_task(recipe)
    best = task.best_metric
    if scores is None:
        print(f"{best.title} {results['validation'][best.key]:.2f} on the validation set, after {minutes:.1f} minutes")
        return
    for example in scores["examples"]:
        for role, text in zip(task.roles, example.values(), strict=True):
            print(f"{role:<12} {text}")
        print()
    signature = scores[best.signature_key]
    warning = describe_seen("test", scores["sentences"], results["seen_in_training"]["test"])
    if warning:
        print(f"{warning}.")
    print(f"{minutes:.1f} minutes in all. {recipe.note}".rstrip())
    sentences = f"{scores['sentences']} {'held-out' if warning else 'unseen'} sentences"
    print(f"{best.title} {scores[best.key]:.2f} on {sentences} ({signature})", flush=True)
    logger.info("%s has the results, and %s the translations.", RESULTS, TRANSLATIONS)
    if scores["examples"]:
        folder = shlex.quote(recipe.output_dir)
        source = shlex.quote(scores["examples"][0]["source"])
        logger.info("Next, %s what you type, and see attention:", task.verb)
        logger.info("%s %s --interactive", task.command, folder)
        logger.info("python -m vaswani_transformer.figures %s %s", folder, source)


def main(arguments: list[str] | None = None) -> None:
    """Run the command; invalid input ends it with one line and exit status 2."""
    arguments = sys.argv[1:] if arguments is None else arguments

    # The help lists the fields of the kinds that the recipe and the arguments name.
    if not arguments or {"-h", "--help"} & set(arguments):
        with exit_on_user_error(ValueError, OSError):
            tree = read_yaml(Path(arguments[0])) if arguments and not arguments[0].startswith("-") else {}
            recipe_parser(tree, arguments).print_help()
        sys.exit(0 if arguments else 2)

    # One process logs, without the progress bars of the libraries.
    is_first = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(format="%(message)s", level=logging.INFO if is_first else logging.ERROR)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # `datasets` forks
    disable_progress_bar()
    datasets.disable_progress_bars()

    what_now = "; the same command resumes the run from its last checkpoint"
    with exit_on_user_error(ValueError, ImportError, OSError, what_now=what_now):
        recipe = load_recipe(arguments[0], arguments[1:])
        if recipe.expected and has_known_data(recipe, arguments):
            logger.info("The recipe as shipped: %s.", recipe.expected)
        results = run(recipe)
        if PartialState().is_main_process:
            report(results, recipe)
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
