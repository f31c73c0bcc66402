"""The rows of the paper's Table 3, each a run of `training.train`, as one table.

`python -m bench.table3 RECIPE --output_dir=DIR [--rows base A-h1] [--training.steps=N ...]` trains the recipe with each
row's `model.paper` into `DIR/ROW`. If it is interrupted, the same command resumes it and skips finished rows. The
recipe must not set a field of the model that a row changes. The last two columns are the paper's, on newstest2013.
"""

import json
import sys
from pathlib import Path
from subprocess import run

from bench.measuring import ROOT, make_parser, report

PAPER = {  # perplexity and BLEU
    "base": (4.92, 25.8),
    "A-h1": (5.29, 24.9),
    "A-h4": (5.00, 25.5),
    "A-h16": (4.91, 25.8),
    "A-h32": (5.01, 25.4),
    "B-dk16": (5.16, 25.1),
    "B-dk32": (5.01, 25.4),
    "C-n2": (6.11, 23.7),
    "C-n4": (5.19, 25.3),
    "C-n8": (4.88, 25.5),
    "C-dmodel256": (5.75, 24.5),
    "C-dmodel1024": (4.66, 26.0),
    "C-dff1024": (5.12, 25.4),
    "C-dff4096": (4.75, 26.2),
    "D-dropout0.0": (5.77, 24.6),
    "D-dropout0.2": (4.95, 25.5),
    "D-smoothing0.0": (4.67, 25.3),
    "D-smoothing0.2": (5.47, 25.7),
    "E": (4.92, 25.7),
    "big": (4.33, 26.4),
}


def main(arguments: list[str] | None = None) -> None:
    """Train the rows and print the table; arguments that this command does not know go to `training.train`."""
    parser = make_parser("table3", __doc__, {"rows": ["base", "C-n2"]})
    parser.add_argument("recipe", metavar="RECIPE", help="the YAML file of the data and the training")
    parser.add_argument("--rows", nargs="+", choices=PAPER, default=list(PAPER), help="rows of the table (all)")
    parser.add_argument("--output_dir", type=Path, required=True, help="folder for all runs")
    options, fields = parser.parse_known_args(arguments)
    rows = []
    for name in options.rows:
        folder = options.output_dir / name
        command = [sys.executable, "-m", "training.train", options.recipe, f"--model.paper={name}"]
        if not (folder / "results.json").exists():
            run([*command, *fields, f"--output_dir={folder}"], cwd=ROOT, check=True, stdout=sys.stderr)
        results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        paper_perplexity, paper_bleu = PAPER[name]
        rows.append(
            {
                "row": name,
                "parameters": results["parameters"],
                "steps": results["steps"],
                "perplexity": results["validation"]["perplexity"],
                "bleu": results["validation"]["bleu"],
                "paper's perplexity": paper_perplexity,
                "paper's BLEU": paper_bleu,
            }
        )
    report(rows, options)


if __name__ == "__main__":
    main()
