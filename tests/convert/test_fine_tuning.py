"""An imported model is trained further on own pairs, by a recipe or the stock trainer, scored, and translates."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForSeq2SeqLM, DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

from tests.convert.originals import CODES, WORDS, FairseqTransformer, V, save_checkpoint
from tests.helpers import load_tokenizer, run_main, write_pairs
from training import score, train
from vaswani_transformer.convert import command as convert
from vaswani_transformer.translation import command as translate

PAIRS = {
    "marian": {"the cat is black": "el gato es negro", "good morning": "buenos dias"},
    "fairseq": {"low lowest": "est low", "lower": "er west", "est lowest": "lower low"},
}
SHAPE = ("d_model", "d_ff", "num_heads", "encoder_layers", "decoder_layers", "attention_bias", "layer_norm_eps")
SHAPE += ("position_embedding", "max_position_embeddings", "scale_embedding", "activation_function")
SHAPE += ("decoder_start_token_id",)


@pytest.fixture(params=PAIRS)
def imported(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[Path, dict[str, str]]:
    """Return the folder of an imported model with random weights, and the pairs that it is to learn."""
    if request.param == "marian":
        call = ["marian", request.getfixturevalue("marian_folder")]
    else:
        words = [*WORDS, *(f"madeupword{number:04}" for number in range(1, V - 3 - len(WORDS)))]
        (tmp_path / "dict.txt").write_text("".join(f"{word} 7\n" for word in words))
        (tmp_path / "codes").write_text(CODES)
        checkpoint = save_checkpoint(tmp_path / "c.pt", FairseqTransformer().state_dict())
        call = ["fairseq", checkpoint, f"--dict={tmp_path / 'dict.txt'}", f"--codes={tmp_path / 'codes'}"]
    assert run_main(convert.main, [*call, tmp_path / "imported"], capsys)[2] == 0
    return tmp_path / "imported", PAIRS[request.param]


def train_by_recipe(model: Path, folder: Path, recipe: Path) -> None:
    given = (f"--training.start_from={model}", f"--tokenizer.path={model}", f"--output_dir={folder}")
    train.main([str(recipe), *given])


def train_by_the_stock_trainer(model: Path, folder: Path, pairs: dict[str, str]) -> None:
    network, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(model, dropout=0.0), load_tokenizer(model)
    settings: dict[str, Any] = {"max_steps": 300, "learning_rate": 3e-3, "save_strategy": "no", "report_to": "none"}
    dataset: Any = [dict(tokenizer(source, text_target=target)) for source, target in pairs.items()]
    trainer = Seq2SeqTrainer(
        network,
        Seq2SeqTrainingArguments(str(folder), predict_with_generate=True, use_cpu=True, **settings),
        train_dataset=dataset,
        data_collator=DataCollatorForSeq2Seq(tokenizer, network),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()


@pytest.mark.slow
@pytest.mark.parametrize("by_recipe", [True, False])
def test_imported_model_is_trained_further_scored_and_translates(
    by_recipe: bool, imported: tuple[Path, dict[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, pairs = imported
    for split in ("train", "validation", "test"):
        write_pairs(tmp_path / f"{split}.jsonl", pairs.items())
    config = json.loads((model / "config.json").read_text())
    files = {split: f"{split}.jsonl" for split in ("train", "validation", "test")}
    settings = {
        "name": "own",
        "data": {"kind": "json", "path": str(tmp_path), **files},
        "model": {"dropout": 0.0, **{field: config[field] for field in SHAPE}},
        "training": {"steps": 300, "warmup_steps": 50, "evaluation_steps": 300, "average_last": 1},
        "decoding": {"max_source_relative_length": 5},
    }
    recipe, trained = tmp_path / "own.yaml", tmp_path / "trained"
    recipe.write_text(yaml.safe_dump(settings))
    if by_recipe:
        train_by_recipe(model, trained, recipe)
    else:
        train_by_the_stock_trainer(model, trained, pairs)
    capsys.readouterr()
    table, errors, status = run_main(score.main, [trained, recipe], capsys)
    assert (status, errors) == (0, "")
    assert "chrf                   100.00" in table
    (tmp_path / "sources.txt").write_text("\n".join(pairs))
    call = [trained, f"--input={tmp_path / 'sources.txt'}", f"--output={tmp_path / 'targets.txt'}"]
    assert run_main(translate.main, call, capsys)[2] == 0
    assert (tmp_path / "targets.txt").read_text().splitlines() == [*pairs.values()]
