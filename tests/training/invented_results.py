"""The results of a run that never was, for tests of cards and of publishing."""

import copy
from typing import Any

from training.recipe.fields import Recipe, to_dict

REPOSITORY = "somebody/own"
SIGNATURE = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0"
CHRF_SIGNATURE = "nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:2.6.0"
TEST_RESULTS = {
    "signature": SIGNATURE,
    "chrf": 50.0,
    "chrf_signature": CHRF_SIGNATURE,
    "sentences": 16,
    "examples": [{"source": 'say "\u00e4"\n', "translation": "x"}],
}


def results_of(
    kind: str = "json",
    path: str = "multi30k",
    scores: tuple[float | None, float | None] = (30.123, 28.456),
    evaluations: int = 3,
    commit: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the `results.json` of an invented run; `scores` are those of validation and test."""
    tree = to_dict(Recipe(name="somebody's run"))
    tree["data"] |= {"kind": kind, "path": path}
    results: dict[str, Any] = {
        "name": "somebody's run",
        "recipe": tree,
        "data": {split: {"pairs": 16, "sha256": "0" * 64} for split in ("train", "validation", "test")},
        "commit": commit,
        "versions": {"python": "3.11.0", "vaswani_transformer": "0.1.0"},
        "hardware": {"cpu": "a CPU", "cores": 2, "threads": 2, "memory": 8.0, "accelerators": {}},
        "processes": 1,
        "parameters": 1_234_567,
        "steps": 100 * evaluations,
        "flops": 1.5e12,
        "curve": [
            entry
            for step in range(100, 100 * evaluations + 1, 100)
            for entry in (
                {"step": step, "loss": 500 / step},
                {"step": step, "eval_loss": 400 / step, "eval_perplexity": 2.0, "eval_bleu": step / 10},
            )
        ],
        "time": {"forward": 3725.0, "other": 0.0},
        "seconds": 3725.0,
    }
    validation, test = scores
    if validation is not None:
        results["validation"] = {"loss": 1.0, "perplexity": 2.7, "bleu": validation, "signature": SIGNATURE}
    if test is not None:
        results["test"] = {"bleu": test} | copy.deepcopy(TEST_RESULTS)
    return results
