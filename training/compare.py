"""Compare models by their test set: `python -m training.compare RUN RUN [...] [--output=FILE]`.

Two folders of runs, or files that `training.score --translations=FILE` wrote, are compared by their translations: the
command prints the scores of both, a paired bootstrap test (Koehn 2004), and the sentences that differ most.

Of three or more runs, those of one recipe with different seeds are a group. The command prints the mean, standard
deviation, lowest and highest of each metric in each group, and the difference of two groups.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sacrebleu.metrics import BLEU, CHRF

from training.fields import language_code
from training.learned import RECIPE
from training.metrics import bleu_metric, nfc, p_value, paired_test, text_statistics
from training.recipe import read_yaml
from training.seeds import load_run, report_summary, summarize
from training.tasks import bleu_tokenizer
from training.train import TRANSLATIONS
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
    help_of_runs = "the folder of a run; of two also a file with translations as JSON Lines"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=help_of_runs)
    parser.add_argument(
        "--sentences", type=int, default=10, metavar="N", help="of two, show the N that differ most (10)"
    )
    parser.add_argument(
        "--tokenize",
        choices=BLEU.TOKENIZERS,
        metavar="NAME",
        help="sacreBLEU's tokenizer for two (that of the runs' recipe, or 13a)",
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
        shown = [f"{score:8.2f} {f'{mean - half:.2f} to {mean + half:.2f}':>16}" for score, mean, half in cells]
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


def compare_pair(options: argparse.Namespace) -> dict[str, Any]:
    """Print and return the comparison of two sets of translations."""
    first, second = map(load_system, options.runs)
    result = compare(first, second, chosen_tokenizer([first, second], options.tokenize))
    report_pair(result, options.sentences)
    return result


def compare_seeds(options: argparse.Namespace) -> dict[str, Any]:
    """Print and return the summary of three or more runs."""
    if options.tokenize is not None:
        raise UserError("--tokenize: is an option for two runs; the scores of more are those that each run has kept.")
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
