"""The results of a run that never was, for tests of cards and of publishing."""

from typing import Any

from training.recipe import FileData, HubData, Recipe, to_dict

REPOSITORY = "somebody/own"
SIGNATURE = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0"
SEARCH = {"num_beams": 4, "length_penalty": 0.6, "pad_token_id": 1}
DATA: dict[str, Any] = {
    "json": FileData(path="multi30k"),
    "hub": HubData(kind="hub", path="wmt/wmt14", train="train", validation="validation", test="test"),
}


def results_of(kind: str = "json", test: float | None = 28.456, **recipe: Any) -> dict[str, Any]:
    """Return the `results.json` of an invented run on a kind of data, with its score of the test set if it has one."""
    results: dict[str, Any] = {
        "name": "somebody's run",
        "recipe": to_dict(Recipe(name="somebody's run", **{"data": DATA[kind]} | recipe)),
        "data": {split: {"pairs": 16, "sha256": "0" * 64} for split in ("train", "validation", "test")},
        "tokens": {"train": {side: {"tokens": 200, "unknown": 1} for side in ("source", "target")}},
        "commit": {"hash": "a" * 40, "dirty": True},
        "versions": {"python": "3.11.0", "vaswani_transformer": "0.1.0"},
        "hardware": {"cpu": "a CPU", "cores": 2, "threads": 2, "memory": 8.0, "accelerators": {"a GPU": 4}},
        "processes": 1,
        "parameters": 1_234_567,
        "steps": 300,
        "curve": [{"step": step, "eval_loss": 400 / step, "eval_bleu": step / 10} for step in (100, 200, 300)],
        "validation": {"loss": 1.0, "bleu": 30.123, "signature": SIGNATURE, "search": {"num_beams": 1}},
        "seconds": 3725.0,
    }
    if test is not None:
        results["test"] = {
            **{"bleu": test, "signature": SIGNATURE, "chrf": 50.0, "chrf_signature": "nrefs:1|case:mixed|eff:yes"},
            **{"search": SEARCH, "sentences": 16, "examples": [{"source": 'say "\u00e4"\n', "translation": "x"}]},
        }
    return results
