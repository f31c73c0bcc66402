"""Every Python block of the README runs as it stands."""

import ast
import re

import pytest
from transformers import GenerationConfig

from tests.helpers import ROOT, model_of_pairs, run_python
from tests.hub_server import Hub, client_environment, serving
from training.recipe import load_recipe
from training.train import run
from vaswani_transformer.convert import main as convert

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
RUN_HERE = (
    "where are they?",
    "draw_attention",
    "CTranslate2Search",
    "Seq2SeqTrainer",
    "push_to_hub(",
    "trust_remote_code=True",
    "prepare_for_inference",
    "LoraConfig",
    "torch.compile",
    "OnnxExporter",
    "ExportedModel",
    "offload_folder",
    "runs/parser",
)


def blocks_with(text):
    return [block for block in BLOCKS if text in block]


def block_with(text):
    (block,) = blocks_with(text)
    return block


def translations(block, folder):
    """The list that a block prints."""
    return ast.literal_eval(run_python(block, folder=folder, PYTHONPATH=str(ROOT)))


def translated(texts, **settings):
    model, tokenizer = model_of_pairs()
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    return tokenizer.batch_decode(model.generate(**batch, **settings), skip_special_tokens=True)


def test_every_block_is_run_here():
    assert all(any(text in block for text in RUN_HERE) for block in BLOCKS)


@pytest.mark.slow
def test_a_quickstart_run_is_used_as_the_readme_says(tmp_path):
    """The run is cut short: what it translates is not looked at, only that it does, and is drawn."""
    more = ["--training.steps=2", "--training.evaluation_steps=2", f"--output_dir={tmp_path}/runs/quickstart"]
    run(load_recipe(ROOT / "training" / "recipes" / "quickstart.yaml", more))
    for block in blocks_with("where are they?"):
        assert run_python(block, folder=tmp_path, PYTHONPATH=str(ROOT)).startswith("[")
    assert run_python(block_with("prepare_for_inference"), folder=tmp_path, PYTHONPATH=str(ROOT)).startswith("[")
    assert run_python(block_with("draw_attention"), folder=tmp_path, PYTHONPATH=str(ROOT)) == ""
    pictures = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert pictures == {"encoder.png", "first-word.pdf", "cross.png", "loss.png"}
    convert(["ctranslate2", f"{tmp_path}/runs/quickstart", f"{tmp_path}/quickstart-ctranslate2", "--quantization=int8"])
    assert run_python(block_with("CTranslate2Search"), folder=tmp_path, PYTHONPATH=str(ROOT)).startswith("[")


@pytest.mark.slow
def test_a_model_is_adapted_compiled_exported_and_spread_as_the_readme_says(tmp_path):
    model, tokenizer = model_of_pairs()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "runs" / "quickstart")
    assert run_python(block_with("LoraConfig"), folder=tmp_path, PYTHONPATH=str(ROOT)) == ""
    assert (tmp_path / "runs" / "adapter" / "adapter_model.safetensors").exists()
    assert (tmp_path / "runs" / "adapted" / "model.safetensors").exists()
    texts = ["the dogs sleep.", "the old woman sees a house."]
    for text in ("torch.compile", "offload_folder"):
        assert translations(block_with(text), tmp_path) == translated(texts)
    run_python(block_with("OnnxExporter"), folder=tmp_path, PYTHONPATH=str(ROOT))
    texts = ["the cats eat.", "the young man sees the house.", "the dogs run."]
    assert translations(block_with("ExportedModel"), tmp_path) == translated(texts, max_new_tokens=30)


@pytest.mark.slow
def test_the_script_with_the_stock_trainer_learns_its_three_pairs(tmp_path):
    output = run_python(block_with("Seq2SeqTrainer"), folder=tmp_path, PYTHONPATH=str(ROOT))
    assert output.splitlines()[-1] == "['hola mundo', 'te amo', 'buenos dias']"


def test_the_script_of_ones_own_is_some_twenty_lines():
    assert len(block_with("Seq2SeqTrainer").strip().splitlines()) <= 28


@pytest.mark.slow
def test_the_search_of_the_parsing_experiments_is_set_as_the_readme_says(tmp_path):
    for part in model_of_pairs():
        part.save_pretrained(tmp_path / "runs" / "parser")
    found = run_python(block_with("runs/parser"), folder=tmp_path, PYTHONPATH=str(ROOT))
    assert found == "['el gato es negro', 'buenos dias']\n"
    search = GenerationConfig.from_pretrained(tmp_path / "runs" / "parser")
    assert (search.num_beams, search.length_penalty, search.length_penalty_type) == (21, 0.3, "gnmt")
    assert search.max_source_relative_length == 300


@pytest.mark.slow
def test_a_model_is_pushed_and_loaded_as_the_readme_says(tmp_path):
    """Without the package where it is loaded."""
    for part in model_of_pairs():
        part.save_pretrained(tmp_path / "runs" / "quickstart")
    pulling = "import sys; sys.modules['vaswani_transformer'] = None\n" + block_with("trust_remote_code=True")
    with serving(Hub()) as url:
        environment = client_environment(url, tmp_path / "home")
        run_python(block_with("push_to_hub("), folder=tmp_path, **environment | {"PYTHONPATH": str(ROOT)})
        assert run_python(pulling, folder=tmp_path, **environment).startswith("[")
