"""Complete small runs of the training command, and the files that they leave."""

import json
import math
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from tests.helpers import ROOT
from tests.training.runs import (
    LANGUAGE,
    TIRED,
    TWO_PROCESSES,
    equal,
    finish,
    kill,
    rewind,
    same_checkpoints,
    start,
    weights,
)
from training import train
from training.checkpoints import last_checkpoint, run_lock, step_of
from training.data import pairs as data_pairs
from training.recipe import load_recipe, to_dict
from training.run_folder import diff_trees, prepare_folder
from training.train import prepare, run
from vaswani_transformer import VaswaniTransformerForConditionalGeneration, VaswaniTransformerTokenizer, batching
from vaswani_transformer.errors import UserError


def kill_after(step, process, folder):
    """Kill a run after its checkpoint of this step; return its last checkpoint."""
    while (last_checkpoint(folder) is None or step_of(last_checkpoint(folder)) < step) and process.poll() is None:
        time.sleep(0.02)
    kill(process)
    assert not (folder / "results.json").exists()
    return last_checkpoint(folder)


@pytest.mark.slow
def test_run_leaves_a_folder_that_loads_and_says_what_it_is(arguments, tmp_path):
    folder = tmp_path / "run"
    recipe = load_recipe(arguments[0], [*arguments[1:], f"--output_dir={folder}", "--training.steps=6"])
    results = run(recipe)

    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert isinstance(model, VaswaniTransformerForConditionalGeneration)
    assert isinstance(tokenizer, VaswaniTransformerTokenizer)
    assert len(tokenizer) == model.config.vocab_size
    search = model.generation_config
    assert (search.num_beams, search.length_penalty, search.length_penalty_type) == (4, 0.6, "gnmt")
    assert search.max_source_relative_length == 50

    assert json.loads((folder / "results.json").read_text()) == json.loads(json.dumps(results))
    assert results["steps"] == 6
    assert [entry["step"] for entry in results["curve"] if "loss" in entry] == [1, 2, 3, 4, 5, 6]
    assert [entry["step"] for entry in results["curve"] if "eval_bleu" in entry] == [3, 6]
    assert re.fullmatch(r"nrefs:1\|.*tok:13a.*", results["test"]["signature"])
    assert list((folder / "tensorboard").glob("events.*"))
    assert {path.suffix for path in folder.iterdir() if path.is_file()} == {".json", ".yaml", ".safetensors"}
    checkpoints = {path.name for path in (folder / "checkpoints").iterdir()}
    assert "checkpoint-6" in checkpoints
    for checkpoint in checkpoints:
        saved = json.loads((folder / "checkpoints" / checkpoint / "generation_config.json").read_text())
        assert saved["length_penalty_type"] == "gnmt"
        assert "max_length" not in saved

    with pytest.raises(UserError, match=r"holds a finished run; give another --output_dir"):
        run(recipe)


@pytest.mark.slow
def test_validation_loss_is_a_mean_over_target_tokens(arguments, tmp_path):
    """The oracle, without the Trainer, is the sum of -log P of all target tokens divided by their number."""
    folder = tmp_path / "run"
    results = run(load_recipe(arguments[0], [*arguments[1:], f"--output_dir={folder}", "--training.steps=3"]))
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total, tokens = 0.0, 0
    for text in LANGUAGE:
        batch = tokenizer(text, text_target=text[::-1], return_tensors="pt")
        log_probs = model(**batch).logits.log_softmax(-1)[0]
        total -= log_probs.gather(1, batch["labels"][0][:, None]).sum().item()
        tokens += batch["labels"].numel()
    last = results["curve"][-1]
    assert last["eval_loss"] == pytest.approx(total / tokens, rel=1e-5)
    assert last["eval_perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-5)


@pytest.mark.slow
def test_evaluation_never_changes_how_the_model_decodes(arguments, tmp_path):
    folder = tmp_path / "run"
    run(load_recipe(arguments[0], [*arguments[1:], f"--output_dir={folder}", "--training.steps=3"]))
    saved = json.loads((folder / "generation_config.json").read_text())
    assert saved["max_source_relative_length"] == 50
    assert saved["num_beams"] == 4  # evaluations during training use one beam
    assert "max_length" not in saved


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), TWO_PROCESSES], ids=["one process", "two processes"])
def test_killed_run_resumes_by_the_same_command_to_the_same_weights(arguments, tmp_path, launcher):
    """Bit for bit on a CPU, dropout and the order of batches included, in the middle of a later epoch."""
    arguments = [*arguments, "--training.steps=40"]
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    finish(start(arguments, uninterrupted, launcher=launcher))
    assert step_of(kill_after(9, start(arguments, killed, launcher=launcher), killed)) < 40
    finish(start(arguments, killed, launcher=launcher))
    assert same_checkpoints(uninterrupted, killed)
    results = json.loads((killed / "results.json").read_text())
    assert (results["steps"], results["processes"]) == (40, 2 if launcher else 1)


@pytest.fixture
def streamed(arguments, tmp_path):
    """Return a streamed run on eighty pairs and one that is too long: buffers of twenty, twelve steps an epoch.

    No step has less than four pairs.
    """
    lines = [json.dumps({"translation": {"en": text, "de": text[::-1]}}) for text in 5 * LANGUAGE]
    lines.insert(50, json.dumps({"translation": {"en": "one tree", "de": 60 * "eert "}}))
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return [*arguments, "--data.streaming=true", "--data.buffer=20", "--data.max_length=40"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), TWO_PROCESSES], ids=["one process", "two processes"])
def test_killed_streamed_run_resumes_by_the_same_command_to_the_same_weights(streamed, tmp_path, launcher):
    """Bit for bit on a CPU, dropout, buffers and batches included, in a later epoch."""
    arguments = [*streamed, "--training.steps=50"]
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    finish(start(arguments, uninterrupted, launcher=launcher))
    checkpoint = kill_after(21, start(arguments, killed, launcher=launcher), killed)
    assert step_of(checkpoint) < 50
    assert json.loads((checkpoint / "stream.json").read_text())["epoch"] > 0
    finish(start(arguments, killed, launcher=launcher))
    assert same_checkpoints(uninterrupted, killed)
    curves = [json.loads((folder / "results.json").read_text())["curve"] for folder in (uninterrupted, killed)]
    for single, resumed in zip(*curves, strict=True):
        for name in ("step", "epoch", "loss", "eval_loss"):
            assert single.get(name) == resumed.get(name)
    assert curves[0][-1]["epoch"] == 4


@pytest.mark.slow
def test_streamed_run_on_two_processes_or_in_micro_batches_learns_from_the_same_steps(streamed, tmp_path):
    """The losses of two epochs' steps agree to 0.005; the loss of a step of other pairs differs by 0.02.

    Dropout is off. Adam enlarges rounding of 1e-7 if a gradient is nearly 0.
    """
    arguments = [*streamed, "--training.steps=24", "--model.dropout=0.0", "--training.learning_rate_scale=0.1"]
    finish(start(arguments, tmp_path / "one"))
    finish(start([*arguments, "--training.device_tokens=30"], tmp_path / "parts"))
    finish(start(arguments, tmp_path / "two", launcher=TWO_PROCESSES))
    one, parts, two = (
        [
            entry["loss"]
            for entry in json.loads((tmp_path / name / "results.json").read_text())["curve"]
            if "loss" in entry
        ]
        for name in ("one", "parts", "two")
    )
    assert len(one) == 24
    assert parts == pytest.approx(one, rel=5e-3)
    assert two == pytest.approx(one, rel=5e-3)


@pytest.mark.slow
def test_bad_line_of_a_stream_ends_the_run_on_reaching_it_and_a_corrected_one_resumes(streamed, tmp_path, monkeypatch):
    monkeypatch.setattr(data_pairs, "PREVIEW_PAIRS", 16)
    monkeypatch.setattr(batching, "ENCODE_BATCH", 1)
    path, folder = tmp_path / "data" / "train.jsonl", tmp_path / "run"
    good = path.read_text()
    lines = good.split("\n")
    path.write_text("\n".join([*lines[:60], "{", *lines[60:]]))
    more = ["--training.steps=20", "--tokenizer.sample=16", f"--output_dir={folder}"]
    with pytest.raises(UserError, match=r"train\.jsonl, line 61: not JSON"):
        run(load_recipe(streamed[0], [*streamed[1:], *more]))
    assert step_of(last_checkpoint(folder)) >= 3
    path.write_text(good)
    results = run(load_recipe(streamed[0], [*streamed[1:], *more]))
    assert results["steps"] == 20
    assert [split for split, entry in results["data"].items() if "first_of_stream" in entry] == ["train"]


def test_streamed_run_with_budgets_too_small_for_its_pairs_is_an_error_before_it_begins(streamed, tmp_path):
    for more, message in (
        ("--training.source_tokens=39", r"training\.source_tokens: a pair may have 40 tokens on that side"),
        ("--training.device_tokens=20", r"data\.buffer: 20 pairs are too few for 3 micro-batches of a step; give at"),
    ):
        with pytest.raises(UserError, match=message):
            run(load_recipe(streamed[0], [*streamed[1:], more, f"--output_dir={tmp_path / 'run'}"]))
        assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_processes_train_to_the_weights_of_one(arguments, tmp_path):
    """A step is the mean over its target tokens for any number of processes, so only the order of sums differs.

    Dropout is off, because its masks differ by process; ten steps of Adam at rates near 1e-2 multiply rounding of 1e-7.
    """
    arguments = [*arguments, "--training.steps=10", "--model.dropout=0.0"]
    one, two = tmp_path / "one", tmp_path / "two"
    finish(start(arguments, one))
    finish(start(arguments, two, launcher=TWO_PROCESSES))
    first, second = weights(one), weights(two)
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-3, atol=1e-4)
    curves = [json.loads((folder / "results.json").read_text())["curve"] for folder in (one, two)]
    for single, shared in zip(*curves, strict=True):
        assert single["step"] == shared["step"]
        for name in single.keys() & {"loss", "eval_loss"}:
            assert single[name] == pytest.approx(shared[name], rel=1e-3)


@pytest.mark.slow
def test_run_in_three_micro_batches_a_step_equals_the_run_in_one(arguments, tmp_path):
    """The device holds a third of a step, so a step has three micro-batches; only the order of sums differs."""
    arguments = [*arguments[1:], "--training.steps=10", "--model.dropout=0.0"]
    ran = {}
    for name, tokens in (("one", 60), ("three", 20)):
        more = [f"--output_dir={tmp_path / name}", f"--training.device_tokens={tokens}"]
        ran[name] = run(load_recipe(tmp_path / "own.yaml", [*arguments, *more]))
    assert ran["three"]["steps"] == ran["one"]["steps"] == 10
    first, second = weights(tmp_path / "one"), weights(tmp_path / "three")
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_run_ends_with_the_mean_of_its_last_checkpoints_if_its_recipe_says_so(arguments, tmp_path):
    folder = tmp_path / "run"
    more = [f"--output_dir={folder}", "--training.steps=12", "--training.average_last=3"]
    results = run(load_recipe(arguments[0], [*arguments[1:], *more]))
    averaged = weights(folder)
    checkpoints = [weights(folder / "checkpoints" / f"checkpoint-{step}") for step in (6, 9, 12)]
    for name, weight in averaged.items():
        torch.testing.assert_close(weight, sum(state[name] for state in checkpoints) / 3)
    assert results["steps"] == 12


@pytest.mark.slow
def test_checkpoints_are_also_written_by_the_clock(arguments, tmp_path):
    folder = tmp_path / "run"
    more = ["--training.steps=8", "--training.evaluation_steps=8", "--training.checkpoint_minutes=0.00001"]
    run(load_recipe(arguments[0], [*arguments[1:], f"--output_dir={folder}", *more]))
    assert len(list((folder / "checkpoints").iterdir())) > 2


@pytest.mark.slow
def test_run_ends_after_its_minutes(arguments, tmp_path):
    folder = tmp_path / "run"
    more = [f"--output_dir={folder}", "--training.steps=100000", "--training.minutes=0.02"]
    results = run(load_recipe(arguments[0], [*arguments[1:], *more]))
    assert 0 < results["steps"] < 100_000
    assert (folder / "model.safetensors").exists()


@pytest.mark.slow
def test_quickstart_passes_99_bleu_and_ends_with_its_line(tmp_path):
    output = finish(start([str(ROOT / "training" / "recipes" / "quickstart.yaml")], tmp_path / "run"), seconds=800)
    line = output.splitlines()[-1]
    match = re.fullmatch(r"BLEU (\d+\.\d\d) on 1000 unseen sentences \((nrefs:1\|.*)\)", line)
    assert match
    assert float(match[1]) > 99
    assert output.count("translation  ") == 5


@pytest.mark.slow
@pytest.mark.parametrize("end", [["--training.steps=7"], TIRED], ids=["steps", "patience"])
def test_run_killed_after_its_last_step_trains_no_further_step(arguments, tmp_path, end):
    folder = tmp_path / "run"
    settings = [arguments[0], *arguments[1:], "--training.steps=30", *end, f"--output_dir={folder}"]
    first = run(load_recipe(settings[0], settings[1:]))
    before = weights(folder)
    (folder / "results.json").unlink()  # killed while the test set was translated
    again = run(load_recipe(settings[0], settings[1:]))
    assert again["steps"] == first["steps"] < 30
    assert again["test"]["bleu"] == first["test"]["bleu"]
    assert equal(before, weights(folder))


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["--training.steps=7", "--training.minutes=0.001"])
def test_finished_run_with_larger_limits_equals_one_that_began_with_them(arguments, tmp_path, limit):
    settings = [*arguments[1:], "--training.steps=12", "--training.evaluation_steps=5"]
    short, long = tmp_path / "short", tmp_path / "whole"
    first = run(load_recipe(arguments[0], [*settings, limit, f"--output_dir={short}"]))
    assert first["steps"] < 12
    kept, model = (short / "results.json").read_text(), weights(short)
    for more in ([limit], [limit, "--training.warmup_steps=9"], ["--training.warmup_steps=9"]):
        with pytest.raises(UserError, match=r"holds a finished run; give another --output_dir, remove the folder, or"):
            run(load_recipe(arguments[0], [*settings, *more, f"--output_dir={short}"]))
    assert (short / "results.json").read_text() == kept
    cut = shutil.copytree(short, tmp_path / "cut")
    rewind(cut, first["steps"])
    less = load_recipe(arguments[0], [*settings, f"--output_dir={cut}", "--training.minutes=0.00001"])
    with pytest.raises(UserError, match=rf"unfinished run of {first['steps']} steps in .* give training\.steps and"):
        prepare_folder(less)
    remarks = ["--expected=better", "--published=as good"]
    again = run(load_recipe(arguments[0], [*settings, *remarks, f"--output_dir={short}"]))
    true = run(load_recipe(arguments[0], [*settings, f"--output_dir={long}"]))
    assert again["recipe"]["published"] == "as good"
    assert again["steps"] == true["steps"] == 12
    before = short / f"finished-{first['steps']}"
    assert (before / "results.json").read_text() == kept
    assert equal(weights(before), model)
    assert isinstance(AutoModelForSeq2SeqLM.from_pretrained(before), VaswaniTransformerForConditionalGeneration)
    assert AutoTokenizer.from_pretrained(before)("a").input_ids == AutoTokenizer.from_pretrained(short)("a").input_ids
    assert again["test"]["bleu"] == true["test"]["bleu"]
    assert equal(weights(short / "checkpoints" / "checkpoint-12"), weights(long / "checkpoints" / "checkpoint-12"))


@pytest.mark.slow
def test_run_rejected_at_its_start_does_not_block_the_next(arguments, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(UserError, match=r"training\.source_tokens: a pair has \d+ tokens .* more than the 5 of a step"):
        run(load_recipe(arguments[0], [*arguments[1:], f"--output_dir={folder}", "--training.source_tokens=5"]))
    assert not folder.exists()


@pytest.mark.slow
def test_learned_positions_that_are_too_few_are_an_error_before_training(arguments, tmp_path):
    more = [
        "--model.position_embedding=learned",
        "--model.max_position_embeddings=30",
        f"--output_dir={tmp_path / 'run'}",
    ]
    with pytest.raises(UserError, match=r"model\.max_position_embeddings: split validation needs \d+ positions"):
        run(load_recipe(arguments[0], [*arguments[1:], *more]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        "--training.precision=bf16",
        "--training.gradient_checkpointing=true",
        "--training.evaluation_beams=3",
        "--model.position_embedding=learned",
        "--model.tie_word_embeddings=false",
        "--model.decoder_start_token_id=2",
        "--tokenizer.algorithm=wordpiece",
        "--data.test=null",
    ],
)
def test_run_with_another_setting_leaves_a_model_that_decodes(arguments, tmp_path, more):
    folder = tmp_path / "run"
    results = run(load_recipe(arguments[0], [*arguments[1:], f"--output_dir={folder}", "--training.steps=3", more]))
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    start = model.config.decoder_start_token_id or tokenizer.bos_token_id
    assert model.generate(**tokenizer("one tree", return_tensors="pt"))[0, 0] == start
    assert ("test" in results) == (more != "--data.test=null")


@pytest.mark.slow
def test_given_tokenizer_is_used_if_it_has_the_special_tokens(arguments, tmp_path):
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(LANGUAGE, 290)
    tokenizer.save_pretrained(tmp_path / "own")
    more = [f"--output_dir={tmp_path / 'run'}", "--training.steps=3", f"--tokenizer.path={tmp_path / 'own'}"]
    run(load_recipe(arguments[0], [*arguments[1:], *more]))
    assert AutoTokenizer.from_pretrained(tmp_path / "run").get_vocab() == tokenizer.get_vocab()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "own")
    more[0] = f"--output_dir={tmp_path / 'other'}"
    with pytest.raises(UserError, match=r"tokenizer\.path: .* has no pad token"):
        run(load_recipe(arguments[0], [*arguments[1:], *more]))
    more[2] = "--tokenizer.path=/nowhere/x"
    with pytest.raises(UserError, match=r"tokenizer\.path: there is no folder /nowhere/x"):
        run(load_recipe(arguments[0], [*arguments[1:], *more]))


def test_folder_that_cannot_be_created_is_an_error(tmp_path, arguments):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file is not a writable folder"):
        prepare_folder(load_recipe(arguments[0], [*arguments[1:], f"--output_dir={tmp_path / 'file' / 'run'}"]))


def test_run_without_an_empty_folder_is_an_error(tmp_path, arguments):
    with pytest.raises(UserError, match=r"output_dir: the run needs a folder;"):
        prepare_folder(load_recipe(arguments[0], arguments[1:]))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds files that are not a run; give another --output_dir"):
        prepare_folder(load_recipe(arguments[0], [*arguments[1:], f"--output_dir={tmp_path}"]))


def test_another_recipe_does_not_take_over_an_unfinished_run(tmp_path, arguments):
    folder = tmp_path / "run"
    folder.mkdir()
    recipe = load_recipe(arguments[0], [*arguments[1:], f"--output_dir={folder}"])
    (folder / "recipe.yaml").write_text(yaml.safe_dump(to_dict(recipe)))
    assert prepare_folder(recipe) == folder
    other = load_recipe(arguments[0], [*arguments[1:], f"--output_dir={folder}", "--training.warmup_steps=7"])
    with pytest.raises(UserError, match=r"unfinished run of another recipe, training\.warmup_steps differs"):
        prepare_folder(other)
    longer = load_recipe(arguments[0], [*arguments[1:], f"--output_dir={folder}", "--training.steps=1000"])
    assert prepare_folder(longer) == folder


def test_folder_of_a_run_that_is_still_running_is_an_error(tmp_path, arguments):
    """This happens after `kill -9` of a launcher, whose processes continue."""
    folder = tmp_path / "run"
    folder.mkdir()
    recipe = load_recipe(arguments[0], [*arguments[1:], f"--output_dir={folder}"])
    (folder / "recipe.yaml").write_text(yaml.safe_dump(to_dict(recipe)))
    with run_lock(folder), pytest.raises(UserError, match=r"run: another run is using it; end its processes"):
        prepare_folder(recipe)
    assert prepare_folder(recipe) == folder


def test_files_of_a_run_killed_at_its_start_do_not_block_the_next(tmp_path, arguments):
    folder = tmp_path / "run"
    (folder / "tmp1.part").mkdir(parents=True)
    (folder / "recipe.yaml.part").write_text("name: ow")
    recipe = load_recipe(arguments[0], [*arguments[1:], f"--output_dir={folder}"])
    assert prepare_folder(recipe) == folder
    prepare(recipe, folder)
    assert {path.name for path in folder.iterdir()} == {
        "data.json",
        "recipe.yaml",
        "tokenizer.json",
        "tokenizer_config.json",
    }


@pytest.mark.parametrize("name", ["flex_attention", "flash_attention_2"])
def test_attention_that_does_not_train_on_a_cpu_is_an_error_before_the_data_is_read(arguments, tmp_path, name):
    more = ["--data.path=/nowhere", f"--training.attention={name}", f"--output_dir={tmp_path / 'run'}"]
    with pytest.raises(UserError, match=rf"^training\.attention: {name} does not train on a CPU, eager and sdpa do;"):
        run(load_recipe(arguments[0], [*arguments[1:], *more]))


@pytest.mark.parametrize("folder", ["/proc/x", "/proc/1/x/y", "x" * 300])
def test_folder_that_cannot_be_written_is_an_error_before_the_data_is_read(arguments, folder):
    with pytest.raises(UserError, match=r"is not a writable folder \(\w.*\); give another --output_dir\.$"):
        run(load_recipe(arguments[0], [*arguments[1:], "--data.path=/nowhere", f"--output_dir={folder}"]))


def test_pairs_that_are_all_too_long_are_an_error_with_the_length_of_the_shortest(arguments, tmp_path):
    more = ["--data.max_length=1", f"--output_dir={tmp_path / 'run'}"]
    with pytest.raises(
        UserError, match=r"all 16 training pairs are longer than 1 tokens, .* the shortest has \d+; rai"
    ):
        run(load_recipe(arguments[0], [*arguments[1:], *more]))


@pytest.mark.parametrize("split", ["train", "validation", "test"])
@pytest.mark.parametrize("change", [lambda text: text.replace("tree", "crow"), lambda text: text.partition("\n")[2]])
def test_data_that_changed_since_the_run_began_is_an_error(arguments, tmp_path, split, change):
    recipe = load_recipe(arguments[0], [*arguments[1:], f"--output_dir={tmp_path / 'run'}"])
    prepare(recipe, prepare_folder(recipe))
    path = tmp_path / "data" / f"{split}.jsonl"
    good = path.read_text()
    path.write_text(change(good))
    with pytest.raises(
        UserError, match=rf"^data\.{split}: these are not the pairs that the run in .* \(16 then, 1[56] n"
    ):
        prepare(recipe, prepare_folder(recipe))
    path.write_text(good)
    prepare(recipe, prepare_folder(recipe))


def test_first_pairs_of_a_stream_that_changed_are_an_error(streamed, tmp_path):
    recipe = load_recipe(streamed[0], [*streamed[1:], f"--output_dir={tmp_path / 'run'}"])
    prepare(recipe, prepare_folder(recipe))
    path = tmp_path / "data" / "train.jsonl"
    path.write_text(path.read_text().replace("one tree", "one crow"))
    with pytest.raises(UserError, match=r"^data\.train: these are not the pairs"):
        prepare(recipe, prepare_folder(recipe))


@pytest.mark.slow
def test_run_resumes_with_other_execution_settings_to_the_same_weights_without_a_warning(arguments, tmp_path, caplog):
    """A step is the same for any split into micro-batches."""
    settings = [*arguments, "--training.steps=9", "--model.dropout=0.0"]
    uninterrupted, other = tmp_path / "uninterrupted", tmp_path / "other"
    run(load_recipe(settings[0], [*settings[1:], f"--output_dir={uninterrupted}"]))
    run(load_recipe(settings[0], [*settings[1:], f"--output_dir={other}"]))
    rewind(other, 3)
    more = ["--training.device_tokens=20", "--training.log_steps=2", "--training.evaluation_batch_size=3"]
    caplog.clear()
    with caplog.at_level("INFO"):
        more += ["--training.gradient_checkpointing=true", "--training.on_divergence=skip"]
        results = run(load_recipe(settings[0], [*settings[1:], *more, f"--output_dir={other}"]))
    assert results["recipe"]["training"]["device_tokens"] == 20
    assert [entry["step"] for entry in results["curve"] if "loss" in entry] == [1, 2, 3, 4, 6, 8]
    first, second = (
        weights(uninterrupted / "checkpoints" / "checkpoint-9"),
        weights(other / "checkpoints" / "checkpoint-9"),
    )
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-3, atol=1e-4)
    assert "Resuming from step 3 of 9." in caplog.text
    assert not [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    with pytest.raises(UserError, match=r"holds a finished run"):
        run(load_recipe(settings[0], [*settings[1:], "--training.device_tokens=30", f"--output_dir={other}"]))


def test_micro_batches_so_small_that_steps_would_change_are_an_error_on_resuming(arguments, tmp_path):
    recipe = load_recipe(arguments[0], [*arguments[1:], f"--output_dir={tmp_path / 'run'}"])
    prepare(recipe, prepare_folder(recipe))
    before = (tmp_path / "run" / "recipe.yaml").read_text()
    other = load_recipe(
        arguments[0], [*arguments[1:], "--training.device_tokens=6", f"--output_dir={tmp_path / 'run'}"]
    )
    with pytest.raises(UserError, match=r"^training\.device_tokens: 6 splits the pairs into other steps than the 25"):
        prepare(other, prepare_folder(other))
    assert (tmp_path / "run" / "recipe.yaml").read_text() == before


@pytest.mark.slow
def test_run_and_its_resumption_print_no_warning(arguments, tmp_path):
    """The output includes that of the libraries."""
    settings = [*arguments, "--training.steps=6", "--training.average_last=2"]
    for _ in range(2):
        process = start(settings, tmp_path / "run")
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        assert not re.search(r"warn|missing|ignored|not valid|do not match", errors, re.IGNORECASE), errors
        rewind(tmp_path / "run", 3)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), TWO_PROCESSES], ids=["one process", "two processes"])
def test_interrupted_run_says_so_in_one_line_and_resumes(arguments, tmp_path, launcher):
    """Torch's launcher adds a traceback and another exit status."""
    settings, folder = [*arguments, "--training.steps=300"], tmp_path / "run"
    process = start(settings, folder, launcher=launcher)
    while last_checkpoint(folder) is None and process.poll() is None:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    lines = [line for line in errors.splitlines() if "Interrupted" in line]
    assert lines == ["Interrupted; the same command resumes the run from its last checkpoint."]
    if not launcher:
        assert process.returncode == 130
        assert "Traceback" not in errors
    step = step_of(last_checkpoint(folder))
    _, again = start([*settings, f"--training.steps={step + 3}"], folder, launcher=launcher).communicate(timeout=300)
    assert f"Resuming from step {step} of {step + 3}." in again


@pytest.mark.parametrize("phase", ["load_pairs", "tokenize", "validation_scores"])
def test_interruption_in_any_phase_ends_the_command_with_one_line(arguments, tmp_path, monkeypatch, capsys, phase):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, phase, interrupt)
    with pytest.raises(SystemExit) as end:
        train.main([*arguments, "--training.steps=1", f"--output_dir={tmp_path / 'run'}"])
    assert end.value.code == 130
    assert capsys.readouterr().err.endswith("Interrupted; the same command resumes the run from its last checkpoint.\n")


def test_differing_fields_are_named():
    assert diff_trees({"a": 1, "b": {"c": 2, "d": 3}}, {"a": 1, "b": {"c": 4, "d": 3}, "e": 5}) == ["b.c", "e"]


def test_bad_recipe_ends_the_command_with_one_line_and_status_2(capsys):
    with pytest.raises(SystemExit) as end:
        train.main(["nowhere.yaml"])
    assert end.value.code == 2
    assert re.fullmatch(r"nowhere\.yaml: there is no such recipe; .*\n", capsys.readouterr().err)


def test_run_writes_nothing_before_the_data_is_read(tmp_path, arguments):
    folder = tmp_path / "run"
    Path(tmp_path / "data" / "test.jsonl").write_text("{\n")
    with pytest.raises(UserError, match=r"test\.jsonl, line 1: not JSON"):
        run(load_recipe(arguments[0], [*arguments[1:], f"--output_dir={folder}"]))
    assert not folder.exists()
