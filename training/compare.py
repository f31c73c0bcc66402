"""Compare models by their test set: `python -m training.compare RUN RUN [...] [--output=FILE]`.

Two folders of runs, or files that `training.score --translations=FILE` wrote, are compared by their translations: the
command prints the scores of both, a paired bootstrap test (Koehn 2004), and the sentences that differ most.

Of three or more runs, those of one recipe with different seeds are a group. The command prints the mean, standard
deviation, lowest and highest of each metric in each group, and the difference of two groups.
"""

import argparse
import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sacrebleu.metrics import BLEU, CHRF

from training.card import read_results
from training.models import RECIPE
from training.recipe import bleu_tokenizer, language_code, read_yaml
from training.tasks import Metric, bleu_metric, nfc, p_value, paired_test, task_class, text_statistics
from training.train import FREE, TRANSLATIONS, flat
from vaswani_transformer.support.command import CommandParser, UserError, exit_on_user_error
from vaswani_transformer.support.files import check_new_file, write_atomically, write_errors

TEXTS = ("source", "translation", "reference")
HOW_TO_MAKE = "Make the file with training, or with training.score --translations=FILE."


@dataclass(frozen=True)
class System:
    """A model's translations of a test set.

    name: path of the run or file.
    sources, translations, references: the texts.
    tokenize: tokenizer of BLEU that the run's recipe names; None for a file.
    """

    name: str
    sources: list[str]
    translations: list[str]
    references: list[str]
    tokenize: str | None


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(prog="python -m training.compare", description=__doc__, allow_abbrev=False)
    help_of_runs = "the folder of a run; for two runs also a file of translations as JSON Lines"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=help_of_runs)
    parser.add_argument(
        "--sentences",
        type=int,
        default=10,
        metavar="N",
        help="for two runs: sentences to show, those that differ most (10)",
    )
    parser.add_argument(
        "--tokenize",
        choices=BLEU.TOKENIZERS,
        metavar="NAME",
        help="for two runs: sacreBLEU's tokenizer (that of their recipe, or 13a)",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="a new file for the comparison as JSON")
    return parser.parse_args(arguments)


def load_system(path: Path) -> System:
    """Return the translations in the folder of a run or in a file."""
    tokenize = None
    file = path
    if path.is_dir():
        file = path / TRANSLATIONS
        if not file.is_file():
            raise UserError(
                f"{path}: has no {TRANSLATIONS}, which a finished run with a test set writes. Finish the run, or make "
                "a file with training.score --translations=FILE."
            )
        recipe = read_yaml(path / RECIPE)  # not as a Recipe, because the family may be a user's own
        if recipe["data"]["kind"] == "trees":
            raise UserError(f"{path}: is the run of a parser; compare runs of translation or dialogue.")
        language = language_code(recipe["data"].get("target_language"), recipe["data"]["target"])
        tokenize = bleu_tokenizer(recipe["score"]["tokenize"], language)
    rows = [read_row(file, number, line) for number, line in enumerate(file.read_bytes().splitlines(), start=1)]
    if not rows:
        raise UserError(f"{file}: contains no translations. {HOW_TO_MAKE}")
    return System(str(path), *([row[name] for row in rows] for name in TEXTS), tokenize=tokenize)


def read_row(file: Path, number: int, line: bytes) -> dict[str, str]:
    """Return a row of a file of translations."""
    try:
        row = json.loads(line)
        "".join(row[name] for name in TEXTS).encode()  # fails for half of a surrogate pair
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{file}, line {number}: is not a translation; got {line[:40].decode(errors='replace')!r}, expected a JSON "
            f"object with the texts {', '.join(TEXTS)}. {HOW_TO_MAKE}"
        ) from error
    return row


def check_same_test_set(first: System, second: System) -> None:
    if len(first.sources) != len(second.sources):
        raise UserError(
            f"{second.name}: has a different test set; got {len(second.sources):,} sentences, expected the "
            f"{len(first.sources):,} of {first.name}. Score both models on the same data, which neither was trained on."
        )
    for name in ("sources", "references"):
        texts = zip(nfc(getattr(first, name)), nfc(getattr(second, name)), strict=True)
        for number, (one, other) in enumerate(texts, start=1):
            if one != other:
                raise UserError(
                    f"{second.name}: has different {name}; got {other[:40]!r} in line {number}, expected {one[:40]!r}, "
                    f"as in {first.name}. Score both models on the same data, which neither was trained on."
                )


def chosen_tokenizer(systems: list[System], option: str | None) -> str:
    """Return the tokenizer of BLEU: the option, or the one of the runs."""
    names = {system.tokenize for system in systems if system.tokenize is not None}
    if option is None and len(names) > 1:
        raise UserError(f"score.tokenize: differs between the runs; got {' and '.join(sorted(names))}. Set --tokenize.")
    return option or next(iter(names), "13a")


def compare(first: System, second: System, tokenize: str) -> dict[str, Any]:
    """Return the scores, signatures and p values of both systems, and all sentences, the most different ones first.

    `mean` and `interval` are those of a score over the bootstrap samples; the 95% interval is mean ± interval.
    """
    check_same_test_set(first, second)
    metrics: dict[str, Any] = {"BLEU": bleu_metric(tokenize), "chrF": CHRF()}
    named = [("A", first.translations), ("B", second.translations)]
    signatures, tested = paired_test(named, metrics, first.references)

    tests = {}
    for title, (key, signature) in zip(metrics, signatures.items(), strict=True):
        results: dict[str, Any] = dict(zip("AB", tested[key], strict=True))
        scores = {
            name: {"score": one.score, "mean": float(one.mean), "interval": float(one.ci)}
            for name, one in results.items()
        }
        tests[title] = scores | {"p": p_value(results["A"], results["B"]), "signature": str(signature)}
    ratios = {name: text_statistics(list(texts), first.references)["length_ratio"] for name, texts in named}
    return {
        "systems": {"A": first.name, "B": second.name},
        "sentences": len(first.sources),
        "tests": tests,
        "length_ratio": ratios,
        "differences": sentence_differences(first, second),
    }


def sentence_differences(first: System, second: System) -> list[dict[str, Any]]:
    """Return line, texts and sentence-level chrF of each pair of translations, the largest differences first."""
    metric = CHRF()
    rows = []
    texts = zip(first.sources, first.references, first.translations, second.translations, strict=True)
    for line, (source, reference, *translations) in enumerate(texts, start=1):
        scores = [metric.sentence_score(text, nfc([reference])).score for text in nfc(translations)]
        row = {"line": line, "source": source, "reference": reference, "A": translations[0], "B": translations[1]}
        rows.append(row | {"chrF": dict(zip("AB", scores, strict=True)), "difference": scores[1] - scores[0]})
    return sorted(rows, key=lambda row: -abs(row["difference"]))


def report_pair(result: dict[str, Any], sentences: int) -> None:
    """Print the scores of both systems, the test, and the sentences that differ most."""
    for name, path in result["systems"].items():
        print(f"{name} {path}")
    print(f"\n{'':<14} {'A':>7} {'95% interval':>16} {'B':>8} {'95% interval':>16} {'B - A':>8} {'p':>7}")
    for name, test in result["tests"].items():
        cells = [(test[system]["score"], test[system]["mean"], test[system]["interval"]) for system in "AB"]
        shown = []
        for score, mean, half in cells:
            interval = f"{mean - half:.2f} to {mean + half:.2f}"
            shown.append(f"{score:8.2f} {interval:>16}")
        print(f"{name:<13} {' '.join(shown)} {cells[1][0] - cells[0][0]:+8.2f} {test['p']:7.3f}")
    ratio = result["length_ratio"]
    print(f"{'length ratio':<13} {ratio['A']:8.3f} {'':>16} {ratio['B']:8.3f}\n")
    for name, test in result["tests"].items():
        print(f"{name} {test['signature']}")

    rows = result["differences"]
    better, worse = (sum(sign * row["difference"] > 0 for row in rows) for sign in (1, -1))
    equal = len(rows) - better - worse
    print(f"\nBy the chrF of each sentence, B is better in {better:,}, worse in {worse:,} and equal in {equal:,}.")
    print("The largest differences:")
    for row in rows[: max(0, sentences)]:
        if row["difference"]:
            print(f"\nline {row['line']}: chrF {row['chrF']['A']:.1f} and {row['chrF']['B']:.1f}")
            for name in ("source", "reference", "A", "B"):
                print(f"  {name:<10} {row[name]}")


# Three or more runs

DETERMINE_SCORES = {"training.steps", "training.minutes", "data.distilled"}
IGNORED = (FREE - DETERMINE_SCORES) | {"seed"}
"""Fields in which runs of one recipe may differ."""
OF_LEARNING = {"tokenizer.algorithm", "tokenizer.vocab_size", "tokenizer.sample"}
"""Fields that a run with a loaded vocabulary does not use."""


@dataclass(frozen=True)
class ScoredRun:
    """A finished run.

    path: its folder.
    name, seed: those of its recipe.
    recipe: fields of its recipe that runs of one group have in common, by dotted name.
    data: name, number of pairs and SHA-256 of the split that was scored.
    scores, signatures: by title of the metric.
    """

    path: str
    name: str
    seed: int
    recipe: dict[str, Any]
    data: dict[str, Any]
    scores: dict[str, float]
    signatures: dict[str, str]


def load_run(path: Path) -> ScoredRun:
    """Return a finished run with the scores of its test set, or of its validation set if it has no test set."""
    results = read_results(path)
    tree = results["recipe"]
    task = task_class(tree["data"]["kind"], tree.get("task", "translation"))
    split = "test" if "test" in results else "validation"
    candidates: Iterable[Metric] = (*task.metrics, *task.more_metrics)
    metrics = [metric for metric in candidates if metric.key in results[split]]
    unused = IGNORED if tree["tokenizer"]["path"] is None else IGNORED | OF_LEARNING
    return ScoredRun(
        path=str(path),
        name=results["name"],
        seed=tree["seed"],
        recipe={name: value for name, value in flat(tree) if name not in unused} | pairs_of(results),
        data={"split": split, **results["data"][split]},
        scores={metric.title: results[split][metric.key] for metric in metrics},
        signatures={metric.title: results[split][metric.signature_key] for metric in metrics},
    )


def pairs_of(results: dict[str, Any]) -> dict[str, str]:
    """Return the SHA-256 of the pairs that a model depends on, as further fields of its recipe.

    Pairs that each seed holds out differently are none of it.
    """
    data = results["data"]
    settings = results["recipe"]["data"]
    if settings.get("split_seed") is None and any(isinstance(settings.get(split), int) for split in data):
        return {}
    return {f"data.{split}.sha256": data[split]["sha256"] for split in ("train", "validation") if split in data}


def group_runs(runs: list[ScoredRun]) -> dict[str, list[ScoredRun]]:
    """Return the runs of each recipe by the letters A, B, ...

    All must have been scored on the same pairs, and the runs of a recipe must differ in their seeds.
    """
    first = runs[0]
    by_recipe: dict[str, list[ScoredRun]] = {}
    for run in runs:
        if run.data != first.data:
            raise UserError(
                f"{run.path}: was scored on different pairs than {first.path}. Use one test set for all runs; for one "
                "that is held out, set data.split_seed in the recipe."
            )
        group = by_recipe.setdefault(json.dumps(run.recipe, sort_keys=True), [])
        for other in group:
            if other.seed == run.seed:
                raise UserError(f"{run.path}: has the recipe and the seed of {other.path}; got seed {run.seed} twice.")
        group.append(run)
    return {chr(ord("A") + index): group for index, group in enumerate(by_recipe.values())}


def spread(values: list[float]) -> dict[str, float | None]:
    """Return mean, sample standard deviation (None for one value), lowest and highest."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.mean(values), "sd": deviation, "lowest": min(values), "highest": max(values)}


def differing_fields(groups: dict[str, list[ScoredRun]]) -> dict[str, dict[str, Any]]:
    """Return the fields in which the recipes of the groups differ, each with its value in every group."""
    recipes = {letter: group[0].recipe for letter, group in groups.items()}
    names = sorted({name for recipe in recipes.values() for name in recipe})
    values = {name: {letter: recipe.get(name) for letter, recipe in recipes.items()} for name in names}
    return {name: row for name, row in values.items() if len({json.dumps(value) for value in row.values()}) > 1}


def summarize(runs: list[ScoredRun]) -> dict[str, Any]:
    """Return the groups, what differs between their recipes, and the spread of each metric in each group.

    For two groups a metric also has `difference`, the mean of B minus that of A, and its `standard_error`.
    """
    groups = group_runs(runs)
    metrics: dict[str, Any] = {}
    shared_titles = [title for title in runs[0].scores if all(title in run.scores for run in runs)]
    for title in shared_titles:
        scores = {letter: [run.scores[title] for run in group] for letter, group in groups.items()}
        metrics[title] = {letter: spread(values) for letter, values in scores.items()}
        if len(groups) == 2:
            means = [statistics.mean(values) for values in scores.values()]
            metrics[title]["difference"] = means[1] - means[0]
            metrics[title]["standard_error"] = standard_error(*scores.values())
        metrics[title]["signatures"] = sorted({run.signatures[title] for run in runs})
    return {
        **runs[0].data,
        "groups": {
            letter: {
                "name": group[0].name,
                "runs": {run.path: {"seed": run.seed, **run.scores} for run in group},
            }
            for letter, group in groups.items()
        },
        "differing_fields": differing_fields(groups),
        "metrics": metrics,
    }


def standard_error(*samples: list[float]) -> float | None:
    """Return the standard error of the difference of two means; None for a sample of one value."""
    if any(len(values) < 2 for values in samples):
        return None
    return sum(statistics.variance(values) / len(values) for values in samples) ** 0.5


def report_summary(summary: dict[str, Any]) -> None:
    """Print the runs, what differs, and a table of the metrics."""
    # The groups.
    for letter, group in summary["groups"].items():
        print(f"{letter} {group['name']}")
        for path, run in group["runs"].items():
            print(f"    {path}, seed {run['seed']}")
    for name, values in summary["differing_fields"].items():
        shown = [f"{letter} {'not set' if value is None else value}" for letter, value in values.items()]
        print(f"{name}: {', '.join(shown)}")

    # The metrics.
    print(f"\n{summary['pairs']:,} pairs of {summary['split']}")
    print(f"{'':<18} {'':<5} {'runs':>5} {'mean':>8} {'sd':>8} {'lowest':>8} {'highest':>8}")
    for title, metric in summary["metrics"].items():
        for letter, group in summary["groups"].items():
            values = metric[letter]
            deviation = "" if values["sd"] is None else f"{values['sd']:.2f}"
            ends = f"{values['lowest']:8.2f} {values['highest']:8.2f}"
            print(f"{title:<18} {letter:<5} {len(group['runs']):>5} {values['mean']:8.2f} {deviation:>8} {ends}")
        if "difference" in metric:
            error = metric["standard_error"]
            precision = "" if error is None else f"  (standard error {error:.2f})"
            print(f"{title:<18} {'B - A':<5} {'':>5} {metric['difference']:+8.2f}{precision}")
    print()
    for title, metric in summary["metrics"].items():
        for signature in metric["signatures"]:
            print(f"{title} {signature}")


# The command


def compare_pair(options: argparse.Namespace) -> dict[str, Any]:
    """Print and return the comparison of two sets of translations."""
    first, second = map(load_system, options.runs)
    result = compare(first, second, chosen_tokenizer([first, second], options.tokenize))
    report_pair(result, options.sentences)
    return result


def compare_seeds(options: argparse.Namespace) -> dict[str, Any]:
    """Print and return the summary of three or more runs."""
    if options.tokenize is not None:
        raise UserError("--tokenize: is an option for two runs; for more, it has no effect. Leave it out.")
    summary = summarize([load_run(path) for path in options.runs])
    report_summary(summary)
    return summary


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    with exit_on_user_error(OSError):
        check_new_file("output", options.output)
        if len(options.runs) == 1:
            raise UserError("RUN: got 1, expected at least two.")
        result = compare_pair(options) if len(options.runs) == 2 else compare_seeds(options)
        if options.output is not None:
            with write_errors(f"--output={options.output}", "the comparison is printed above"):
                write_atomically(options.output, json.dumps(result, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
