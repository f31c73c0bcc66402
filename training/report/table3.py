"""Table 3 of the paper, and a table of other runs in its columns, with standard deviations over seeds and orderings."""

import itertools
import statistics
from dataclasses import dataclass
from typing import Any

from training.tasks import Metric


@dataclass(frozen=True)
class PaperFigures:
    """A row of Table 3 on newstest2013: perplexity of a subword, BLEU, and millions of parameters where printed."""

    perplexity: float
    bleu: float
    parameters: int | None = None


PAPER_FIGURES = {
    "base": PaperFigures(4.92, 25.8, 65),
    "A-h1": PaperFigures(5.29, 24.9),
    "A-h4": PaperFigures(5.00, 25.5),
    "A-h16": PaperFigures(4.91, 25.8),
    "A-h32": PaperFigures(5.01, 25.4),
    "B-dk16": PaperFigures(5.16, 25.1, 58),
    "B-dk32": PaperFigures(5.01, 25.4, 60),
    "C-n2": PaperFigures(6.11, 23.7, 36),
    "C-n4": PaperFigures(5.19, 25.3, 50),
    "C-n8": PaperFigures(4.88, 25.5, 80),
    "C-dmodel256": PaperFigures(5.75, 24.5, 28),
    "C-dmodel1024": PaperFigures(4.66, 26.0, 168),
    "C-dff1024": PaperFigures(5.12, 25.4, 53),
    "C-dff4096": PaperFigures(4.75, 26.2, 90),
    "D-dropout0.0": PaperFigures(5.77, 24.6),
    "D-dropout0.2": PaperFigures(4.95, 25.5),
    "D-smoothing0.0": PaperFigures(4.67, 25.3),
    "D-smoothing0.2": PaperFigures(5.47, 25.7),
    "E": PaperFigures(4.92, 25.7),
    "big": PaperFigures(4.33, 26.4, 213),
}


def row_summary(row: str, change: dict[str, Any], runs: dict[int, dict[str, Any]], metric: Metric) -> dict[str, Any]:
    """Return a row of the table from the results of its runs, by seed.

    perplexity, and the task's metric by its key: the `mean` over seeds, and the sample `std`, which is None for one.
    """
    names = ("perplexity", metric.key)
    values = {name: [results["validation"][name] for results in runs.values()] for name in names}
    metrics = {
        name: {"mean": statistics.mean(each), "std": statistics.stdev(each) if len(each) > 1 else None}
        for name, each in values.items()
    }
    return {
        "change": change,
        "paper": vars(PAPER_FIGURES[row]),
        "parameters": next(iter(runs.values()))["parameters"],
        **metrics,
        "runs": {
            str(seed): {
                **{name: results["validation"][name] for name in names},
                "steps": results["steps"],
                "seconds": results["seconds"],
                "signature": results["validation"][metric.signature_key],
                "commit": results["commit"],
            }
            for seed, results in sorted(runs.items())
        },
    }


def group_of(row: str) -> str:
    """Return a row's group in Table 3: the letter, or "big"."""
    return row.partition("-")[0]


def orderings(rows: dict[str, dict[str, Any]], key: str = "bleu") -> dict[str, dict[str, Any]]:
    """Return, for each group with its base and each metric, which pairs of rows are ordered as in the paper.

    The task's metric, by its key, is compared with the paper's BLEU. Pairs that are equal in the paper are left out.
    `differ` lists the pairs of another order, the row that the paper has the better figure for first.
    """
    comparison: dict[str, dict[str, Any]] = {}
    for group in dict.fromkeys(group_of(row) for row in rows if row != "base"):
        members = [row for row in rows if row == "base" or group_of(row) == group]
        for metric, printed, sign in (("perplexity", "perplexity", -1), (key, "bleu", 1)):
            pairs, differ = 0, []
            for one, other in itertools.combinations(members, 2):
                paper = sign * (getattr(PAPER_FIGURES[one], printed) - getattr(PAPER_FIGURES[other], printed))
                ours = sign * (rows[one][metric]["mean"] - rows[other][metric]["mean"])
                pairs += paper != 0
                if paper * ours <= 0 and paper != 0:
                    differ.append([one, other] if paper > 0 else [other, one])
            if pairs:
                comparison.setdefault(group, {})[metric] = {"pairs": pairs, "as_in_the_paper": pairs - len(differ)}
                comparison[group][metric]["differ"] = differ
    return comparison


def with_std(figure: dict[str, float | None], digits: int) -> str:
    mean = f"{figure['mean']:.{digits}f}"
    return mean if figure["std"] is None else f"{mean} ± {figure['std']:.{digits}f}"


def format_change(change: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in change.items())


def format_row(row: str, summary: dict[str, Any], key: str) -> str:
    steps = sorted({run["steps"] for run in summary["runs"].values()})
    paper = summary["paper"]
    cells = [
        row,
        format_change(summary["change"]),
        " to ".join(f"{step:,d}" for step in dict.fromkeys((steps[0], steps[-1]))),
        str(len(summary["runs"])),
        with_std(summary["perplexity"], 2),
        with_std(summary[key], 2),
        f"{summary['parameters'] / 1e6:.2f}",
        f"{paper['perplexity']:.2f}",
        f"{paper['bleu']:.1f}",
        "" if paper["parameters"] is None else str(paper["parameters"]),
    ]
    return f"| {' | '.join(cells)} |"


def to_markdown(table: dict[str, Any]) -> str:
    """Return the table as Markdown: base, rows with the paper's figures at the right, and the orderings."""
    key, title = table["metric"]["key"], table["metric"]["title"]
    titles = ["row", "change", "steps", "seeds", "PPL (dev)", f"{title} (dev)", "parameters (M)"]
    titles += ["paper: PPL", "paper: BLEU", "paper: parameters (M)"]
    lines = [
        f"Base: {format_change(table['base'])}.",
        "",
        f"| {' | '.join(titles)} |",
        f"| {' | '.join(['---'] * len(titles))} |",
        *(format_row(row, summary, key) for row, summary in table["rows"].items()),
        "",
    ]
    for group, metrics in table["orderings"].items():
        for metric, counts in metrics.items():
            name = title if metric == key else metric
            line = f"- {group}, {name}: {counts['as_in_the_paper']} of {counts['pairs']} pairs ordered as in the paper"
            if counts["differ"]:
                line += "; not " + ", ".join(f"{better} before {worse}" for better, worse in counts["differ"])
            lines.append(f"{line}.")
    lines += [f"- Failed: {name}: {error}" for name, error in table["errors"].items()]
    return "\n".join(lines) + "\n"
