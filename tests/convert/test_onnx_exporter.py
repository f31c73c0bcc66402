"""A model in ONNX has the model's logits and greedy search, in onnxruntime and in transformers.js."""

import copy
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import ByT5Tokenizer

from tests import ROOT
from tests.batches import source_batch
from tests.command_parsers import blocks_of
from tests.commands import error_line, run_main, user_error
from tests.models import PAIRS, ModelAndTokenizer, paper_model_of_pairs, random_model, save, tiny_ctc, tiny_model
from vaswani_transformer import VaswaniTransformerTokenizer, prepare_for_inference
from vaswani_transformer.convert.command import main
from vaswani_transformer.convert.onnx_exporter import FOLDER, INT8, Graphs, check_graphs, to_onnx

END = 2
TEXTS = ["the cat is black", "<2es> good morning", "a<2es>b"]


@pytest.fixture(scope="module")
def original() -> ModelAndTokenizer:
    """Return the model of pairs, with a special token of a user."""
    model, tokenizer = copy.deepcopy(paper_model_of_pairs())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<2es>"]})
    model.resize_token_embeddings(len(tokenizer))
    return model, tokenizer


@pytest.fixture(scope="module")
def exported(original: ModelAndTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("onnxruntime", reason="the onnx extra is not installed")
    folder = tmp_path_factory.mktemp("models")
    main(["onnx", str(save(folder / "original", *original)), str(folder / "exported")])
    return folder / "exported"


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """Compare logits of two engines in float32."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4 * max(1.0, float(expected.abs().max())))


@pytest.mark.slow
def test_folder_has_the_layout_of_transformers_js(exported: Path) -> None:
    import onnx

    assert sorted(str(path.relative_to(exported)) for path in exported.rglob("*") if path.is_file()) == [
        *("config.json", "generation_config.json"),
        *("onnx/decoder_model_merged.onnx", "onnx/decoder_model_merged_quantized.onnx"),
        *("onnx/encoder_model.onnx", "onnx/encoder_model_quantized.onnx"),
        *("tokenizer.json", "tokenizer_config.json"),
    ]
    stacks = [f"{index}.{stack}" for index in (0, 1) for stack in ("decoder", "encoder")]
    cache = [f"{stack}.{name}" for stack in stacks for name in ("key", "value")]
    inputs = ["encoder_attention_mask", "input_ids", "encoder_hidden_states"]
    names = {
        "encoder_model": (["input_ids", "attention_mask"], ["last_hidden_state"]),
        "decoder_model_merged": (
            [*inputs, *(f"past_key_values.{name}" for name in cache)],
            ["logits", *(f"present.{name}" for name in cache)],
        ),
    }
    for name, (inputs, outputs) in names.items():
        for suffix in ("", INT8):
            graph = onnx.load(exported / FOLDER / f"{name}{suffix}.onnx").graph
            assert [value.name for value in graph.input] == inputs
            assert [value.name for value in graph.output] == outputs
            for value in (*graph.input, *graph.output):
                assert value.type.tensor_type.shape.dim[0].dim_param == "batch_size"
            assert "If" not in {node.op_type for node in graph.node}


@pytest.mark.slow
def test_matrices_are_stored_once_in_each_graph_and_int8_takes_a_quarter(
    exported: Path, original: ModelAndTokenizer
) -> None:
    import onnx

    body = original[0].model
    for name, stack in (("encoder_model", body.encoder), ("decoder_model_merged", body.decoder)):
        size = 4 * sum(weight.numel() for weight in stack.parameters())  # with the embedding
        sizes = {}
        for suffix in ("", INT8):
            tensors = onnx.load(exported / FOLDER / f"{name}{suffix}.onnx").graph.initializer
            sizes[suffix] = sum(onnx.numpy_helper.to_array(tensor).nbytes for tensor in tensors)
        assert size <= sizes[""] < size + 2000
        assert sizes[INT8] < size / 3


@pytest.mark.slow
def test_no_file_has_a_path_of_this_machine(exported: Path) -> None:
    for path in exported.rglob("*"):
        assert path.is_dir() or not re.search(rb"site-packages|vaswani_transformer/", path.read_bytes()), path


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[1], [3, 9, 1]])
@pytest.mark.parametrize("steps", [[1, 1, 1], [4, 1, 2], [2]])
def test_graphs_have_the_logits_of_any_batch_lengths_and_steps(
    exported: Path, original: ModelAndTokenizer, lengths: list[int], steps: list[int]
) -> None:
    batch = source_batch(lengths)
    targets = torch.randint(3, 99, (len(lengths), sum(steps)))
    graphs = Graphs(exported / FOLDER)
    logits = [*graphs.steps(batch["input_ids"], batch["attention_mask"], iter(targets.split(steps, dim=1)))]
    assert [each.shape[1] for each in logits] == steps
    with torch.no_grad():
        assert_near(torch.cat(logits, dim=1), original[0](**batch, decoder_input_ids=targets).logits)


def greedy(graphs: Graphs, source: Any) -> Tensor:
    """Return the start token and the greedy search's tokens (1, T) for one source."""
    tokens = [torch.tensor([[0]])]
    newest = (tokens[-1] for _ in range(30))
    for logits in graphs.steps(source.input_ids, source.attention_mask, newest):
        tokens.append(logits[:, -1:].argmax(-1))
        if tokens[-1] == END:
            break
    return torch.cat(tokens, dim=1)


def assert_greedy(model: Any, source: Any, target: Tensor) -> None:
    """Assert that each token is the model's most probable one after those before it, up to rounding."""
    with torch.no_grad():
        logits = model(**source, decoder_input_ids=target[:, :-1]).logits  # (1, T, V)
    assert_near(logits.gather(2, target[:, 1:, None])[..., 0], logits.amax(-1))


@pytest.mark.slow
def test_greedy_search_over_the_graphs_is_the_models(exported: Path, original: ModelAndTokenizer) -> None:
    model, tokenizer = original
    for text in PAIRS:
        source = tokenizer(text, return_tensors="pt")
        assert_greedy(model, source, greedy(Graphs(exported / FOLDER), source))


@pytest.mark.slow
def test_different_logits_are_an_error(exported: Path, original: ModelAndTokenizer) -> None:
    other = random_model(vocab_size=len(original[1]), d_model=64, d_ff=128)
    with user_error(r"^out: logits differ by up to \S+ from the model's, so no file is written\.$"):
        check_graphs(other, exported / FOLDER, "out")


@pytest.mark.slow
def test_every_setting_of_the_papers_model_is_exported_and_the_model_is_not_changed(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"encoder_layers": 1, "decoder_layers": 1, "d_k": 3, "d_v": 5, "attention_bias": True}
    shape |= {"position_embedding": "learned", "max_position_embeddings": 9, "scale_embedding": False}
    shape |= {"tie_word_embeddings": False, "activation_function": "gelu_new", "eos_token_id": [2, 4]}
    model = random_model(**shape).bfloat16().train()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    result = to_onnx(model, None, tmp_path / "exported")  # it compares all logits
    assert result.folder == tmp_path / "exported"
    assert 0 <= result.equal_tokens <= 1
    assert model.training
    assert all(weight.requires_grad for weight in model.parameters())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert json.loads((result.folder / "config.json").read_text())["eos_token_id"] == [2, 4]
    assert json.loads((result.folder / "generation_config.json").read_text())["max_new_tokens"] == 9  # the positions


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (tiny_ctc, "A VaswaniCtcForConditionalGeneration is not a VaswaniTransformerFor"),
        (lambda: prepare_for_inference(tiny_model()), "is a .* whose weight is not loaded; merge adapters"),
        (lambda: tiny_model(attention_window=3), "attention_window: cannot be exported to ONNX; got 3, expected None"),
    ],
)
def test_model_that_is_not_exported_is_an_error_that_leaves_no_file(
    make: Callable[[], Any], message: str, tmp_path: Path
) -> None:
    with user_error(message):
        to_onnx(make(), None, tmp_path / "exported")
    assert list(tmp_path.iterdir()) == []


def test_tokenizer_that_does_not_fit_or_has_no_file_is_an_error(tmp_path: Path) -> None:
    with user_error(r"^A ByT5Tokenizer has no tokenizer\.json, which JavaScript needs; pass tokenizer=None"):
        to_onnx(tiny_model(), ByT5Tokenizer(), tmp_path / "exported")
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(["a b"], vocab_size=270)
    with pytest.raises(ValueError, match=r"its tokenizer has \d+ entries, the model only 99"):
        to_onnx(tiny_model(), tokenizer, tmp_path / "exported")
    assert list(tmp_path.iterdir()) == []


def test_command_refuses_other_families_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "ctc", tiny_ctc())
    capsys.readouterr()  # of saving
    line = error_line(run_main(main, ["onnx", tmp_path / "ctc", tmp_path / "out"], capsys))
    assert "wrong model type; got 'vaswani_ctc', expected 'vaswani_transformer'" in line


def test_command_without_its_extra_ends_with_one_line_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    line = error_line(run_main(main, ["onnx", tmp_path / "model", tmp_path / "out"], capsys))
    assert line.startswith("ONNX: cannot be exported (")
    assert line.endswith('; run pip install "vaswani-transformer[onnx]".\n')


# transformers.js


def run_program(*command: str, folder: Path, **settings: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", timeout=600, **settings)


@pytest.fixture(scope="module")
def javascript(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which Node.js finds transformers.js, installed by the command of the page."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("Node.js or npm is not installed")
    folder = tmp_path_factory.mktemp("javascript")
    package = "@huggingface/transformers@4"
    # Without scripts, since one of them downloads what a GPU needs.
    finished = run_program(npm, "install", package, "--ignore-scripts", "--no-audit", "--no-fund", folder=folder)
    if finished.returncode:
        pytest.skip(f"npm cannot install {package}: {finished.stderr.strip()[:300]}")
    return folder


@pytest.mark.slow
def test_script_of_the_page_translates_in_transformers_js(
    exported: Path, original: ModelAndTokenizer, javascript: Path
) -> None:
    """Its tokenizer keeps special tokens whole, and its greedy search has the model's most probable tokens."""
    (script,) = blocks_of(ROOT / "docs" / "cpu.md", "js")
    shutil.copytree(exported, javascript / "tatoeba-onnx")
    model, tokenizer = original
    source = TEXTS[0]
    script = re.sub(r'translator\(".*?"\)', f"translator({json.dumps(source)})", script)
    more = f"""
const ids = {json.dumps(TEXTS)}.map((text) => Array.from(translator.tokenizer(text).input_ids.data, Number));
const tokens = Array.from((await translator.model.generate(translator.tokenizer({json.dumps(source)}))).data, Number);
console.log(JSON.stringify({{ ids, tokens }}));
"""
    (javascript / "translate.mjs").write_text(script + more, encoding="utf-8")
    finished = run_program("node", "translate.mjs", folder=javascript)
    assert finished.returncode == 0, finished.stderr
    *_, text, answer = finished.stdout.splitlines()
    result = json.loads(answer)
    assert result["ids"] == [tokenizer(each).input_ids for each in TEXTS]
    assert text == tokenizer.decode(result["tokens"], skip_special_tokens=True)
    assert finished.stderr == ""
    target = torch.tensor([result["tokens"]])
    assert target[0, -1] == END
    assert_greedy(model, tokenizer(source, return_tensors="pt"), target)
