"""vaswani-translate with NAT and CMLM: their options, their scores, and one line for the options of another family."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from tests.helpers import Run, error_line, model_of_pairs, save
from tests.nar_models import FAMILY, family_of_pairs
from tests.translation.commands import SOURCES, lines
from vaswani_transformer import VaswaniTransformerTokenizer
from vaswani_transformer.cpu.model import Prepared
from vaswani_transformer.translation import loading

Models = tuple[Path, dict[str, Any], VaswaniTransformerTokenizer]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Save a model of each family and an autoregressive one; return their folder, the first ones, and a tokenizer."""
    root, models = tmp_path_factory.mktemp("models"), {family: family_of_pairs(family) for family in FAMILY}
    for name, parts in (*models.items(), ("transformer", model_of_pairs())):
        save(root / name, *parts)
    return root, {family: model for family, (model, _) in models.items()}, models["nat"][1]


@pytest.fixture
def run_family(run: Run, models: Models) -> Run:
    """Return a function that runs the command with a model of a family and returns output, errors and status."""

    def run_family(family: str, *arguments: str, texts: Iterable[str] = SOURCES) -> tuple[str, str, str | int | None]:
        return run(*arguments, stdin=lines(texts).encode(), model=models[0] / family)

    return run_family


def generated(models: Models, family: str, **settings: Any) -> list[tuple[str, float]]:
    """Return texts and scores of `generate()`, sentence by sentence."""
    _, folders, tokenizer = models
    results = []
    for source in SOURCES:
        batch = tokenizer([source], return_tensors="pt")
        output = folders[family].generate(**batch, return_dict_in_generate=True, **settings)
        texts = tokenizer.batch_decode(output.sequences, skip_special_tokens=True)
        results += list(zip(texts, output.sequences_scores.tolist(), strict=True))
    return results


@pytest.mark.parametrize(
    ("family", "options", "settings"),
    [
        ("nat", [], {}),
        ("nat", ["--length_beam=3", "--iterations=1"], {"length_beam_size": 3}),
        ("cmlm", ["--iterations=4", "--length_beam=2"], {"num_iterations": 4, "length_beam_size": 2}),
        ("cmlm", ["--length_beam=3", "--nbest=2"], {"length_beam_size": 3, "num_return_sequences": 2}),
        ("nat", ["--length_beam=3", "--length_penalty=2"], {"length_beam_size": 3, "length_penalty": 2.0}),
        ("cmlm", ["--max_length=5"], {"max_new_tokens": 5}),
    ],
    ids=str,
)
def test_family_translates_by_its_options_and_scores_by_its_own_scores(
    run_family: Run, models: Models, family: str, options: list[str], settings: dict[str, int]
) -> None:
    texts = (json.dumps({"text": text}) for text in SOURCES)
    output, errors, status = run_family(family, *options, "--scores", "--format=jsonl", texts=texts)
    assert (errors, status) == ("", 0)
    rows = [row for line in output.splitlines() for row in json.loads(line).get("nbest", [json.loads(line)])]
    expected = generated(models, family, **settings)
    assert [row["translation"] for row in rows] == [text for text, _ in expected]
    assert [row["score"] for row in rows] == pytest.approx([score for _, score in expected], abs=2e-3)


@pytest.mark.parametrize("family", FAMILY)
def test_family_on_a_cpu_is_prepared_too(run_family: Run, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, load = [], loading.load_model_and_tokenizer

    def watched(options: loading.LoadOptions) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        prepared.append(load(options))
        return prepared[-1]

    monkeypatch.setattr(loading, "load_model_and_tokenizer", watched)
    assert run_family(family, "--dtype=int8")[2] == 0
    assert isinstance(prepared[0][0], Prepared)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("nat", ["--iterations=2"], "--iterations=2: {} has one pass. Leave it out, or give a CMLM."),
        ("nat", ["--beams=4"], "--beams: {} predicts all words at once and has no beams. Leave it out, or give --"),
        ("cmlm", ["--length_beam=21"], "--length_beam=21: {} has 20 length classes. Give at most as many."),
        ("cmlm", ["--nbest=2"], "--nbest=2: more than the 1 lengths of the length beam; give --length_beam=2 as well."),
        ("transformer", ["--iterations=2"], "--iterations: {} writes one token after the other; it is an option of"),
        ("transformer", ["--length_beam=2"], "--length_beam: {} writes one token after the other; it is an option of"),
    ],
    ids=str,
)
def test_option_of_another_family_ends_the_command_with_one_line(
    run_family: Run, models: Models, family: str, options: list[str], message: str
) -> None:
    assert error_line(run_family(family, *options)).startswith(message.format(models[0] / family))


def test_saved_beams_of_a_family_end_the_command_with_one_line(run: Run, models: Models, tmp_path: Path) -> None:
    model = FAMILY["nat"](vocab_size=len(models[2]))
    model.generation_config = GenerationConfig(num_beams=4)
    save(tmp_path, model, models[2])
    assert error_line(run(stdin=b"cat\n", model=tmp_path)).startswith("num_beams: ")
