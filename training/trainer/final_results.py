"""The results of a trained model: its scores by the recipe's search, in `results.json`."""

import json
import time
from typing import Any, cast

from transformers import EarlyStoppingCallback

from training.data.stream import described
from training.report.results import RESULTS, to_json_values
from training.run.checkpoints import last_checkpoint, run_write_errors
from training.run.initial_weights import recorded_models
from training.run.preparation import Prepared, read_fingerprints
from training.trainer.trainer import RecipeTrainer, read_stream
from vaswani_transformer.support.files import write_atomically


def validation_scores(trainer: RecipeTrainer) -> dict[str, Any]:
    """Return loss, perplexity and best metric on the validation set, by the search of evaluations in training.

    A model that predicts all words at once has no perplexity.
    """
    trainer.remove_callback(EarlyStoppingCallback)  # it would expect metrics of another name
    metrics, best = trainer.evaluate(metric_key_prefix="eval_final"), trainer.task.best_metric
    scores = {name: metrics[f"eval_final_{name}"] for name in trainer.metric_names}
    return scores | {best.signature_key: trainer.signature}


def test_scores(trainer: RecipeTrainer, prepared: Prepared) -> dict[str, Any]:
    """Return the task's metrics on the test set by the recipe's search, with a few example sentences."""
    start, task, pairs = time.perf_counter(), trainer.task, prepared.pairs["test"]
    trainer.search = trainer.recipe.generation_config(trainer.model.config, trainer.processing_class)
    output = trainer.predict(cast(Any, prepared.encoded["test"]))
    texts, sources, references = [str(text) for text in output.predictions], pairs["source"][:], pairs["target"][:]
    scores, shown = task.test(texts, references), trainer.recipe.score.examples
    indices = range(0, len(texts), max(1, len(texts) // max(1, shown)))[:shown]
    return {
        **scores,
        **{name: (output.metrics or {})[f"test_{name}"] for name in trainer.metric_names},
        "sentences": len(texts),
        "seconds": time.perf_counter() - start,
        "examples": [
            {
                "source": sources[index],
                "translation": task.display(sources[index], texts[index]),
                "reference": task.display(sources[index], references[index]),
            }
            for index in indices
        ],
    }


def write_results(trainer: RecipeTrainer, prepared: Prepared) -> dict[str, Any]:
    """Return the content of results.json; every process must call, and the main one writes it.

    The existence of the file says that the run is finished.
    """
    folder = prepared.folder
    results: dict[str, Any] = {"name": None, "recipe": None, "data": read_fingerprints(folder)}
    if trainer.stream is not None and (checkpoint := last_checkpoint(folder)) is not None:
        results["data"]["train"]["read"] = described(read_stream(checkpoint)["pairs"])
    if models := recorded_models(folder):
        results["models"] = models
    results |= trainer.results()
    results["validation"] = validation_scores(trainer)
    if "test" in prepared.encoded:
        results["test"] = test_scores(trainer, prepared)
    results["time"] = trainer.monitor.time()
    results["seconds"] = sum(results["time"].values())
    if trainer.is_world_process_zero():
        content = json.dumps(to_json_values(results), indent=2, ensure_ascii=False, allow_nan=False)
        with run_write_errors(folder / RESULTS):
            write_atomically(folder / RESULTS, content)
    return results
