"""Every promise of docs/api.md holds for every family, except for the cells where its table says "no".

Models are in float64 where tokens are compared: rounding decides between no tokens there.

B batch, T target, V vocabulary.
"""

import contextlib
import copy
import functools
import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, PeftConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, TaskType, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM, pipeline

from tests import ROOT
from tests.batches import FLOAT32, assert_equal_at_tokens, source_batch, targets
from tests.convert.originals import assert_same_probabilities
from tests.models import EVERY_FAMILY, PAIRS, SLOT_FAMILY, family_of_pairs, save, with_normal_weights
from tests.published import assert_same_results, load_without_the_package
from vaswani_transformer.convert.ctranslate2_exporter import to_ctranslate2
from vaswani_transformer.convert.onnx_exporter import to_onnx
from vaswani_transformer.pipeline import TASK
from vaswani_transformer.registration import FAMILIES

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)  # of PEFT, Accelerate and the exporters

NAR = list(EVERY_FAMILY)[1:]


def batch_of(*lengths: int) -> dict[str, Tensor]:
    """Return sources with their mask, and labels of these lengths."""
    return source_batch([6, 4, 5]) | {"labels": targets(*lengths)}


def target_of(family: str, batch: dict[str, Tensor]) -> dict[str, Any]:
    """Return a batch whose target is given without labels, by its mask and, if the family reads words, its words.

    A model with slots gets their mask, which it ignores.
    """
    labels = batch.pop("labels")
    if family in SLOT_FAMILY:
        upsampling = FAMILIES[family].model_class.config_class().upsampling
        source = batch["attention_mask"].sort(descending=True).values
        return batch | {"decoder_attention_mask": source.repeat_interleave(upsampling, 1)}
    words = {"decoder_input_ids": labels.clamp(min=3)} if family in ("autoregressive", "cmlm") else {}
    return batch | words | {"decoder_attention_mask": labels.ne(-100).long()}


def assert_same_answers(model: Any, expected: Any, batch: dict[str, Tensor], **tolerance: Any) -> None:
    """Compare loss, logits and tokens."""
    source = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        for answer in (lambda m: m(**batch).loss, lambda m: m(**batch).logits):
            torch.testing.assert_close(answer(model), answer(expected), **tolerance)
    assert torch.equal(model.generate(**source, max_new_tokens=9), expected.generate(**source, max_new_tokens=9))


def assert_same_weights(model: Any, expected: Any) -> None:
    """Compare weights to the bit; results may round differently, by where weights are in memory."""
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)


def offloads_to_the_cpu(family: str, folder: Path) -> None:
    model = cpu_offload(EVERY_FAMILY[family]().double(), torch.device("cpu"))
    assert {weight.device.type for weight in model.parameters()} == {"meta"}  # until it is needed
    assert_same_answers(model, EVERY_FAMILY[family]().double(), batch_of(5, 3, 4))


def offloads_to_the_disk(family: str, folder: Path) -> None:
    EVERY_FAMILY[family]().double().save_pretrained(folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(
        folder, device_map="auto", max_memory={"cpu": 20_000}, offload_folder=folder / "offloaded"
    )
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    assert_same_answers(model, EVERY_FAMILY[family]().double(), batch_of(5, 3, 4))


def shallow(family: str, **fields: Any) -> Any:
    """Return a model with one layer in each stack, two in the decoder of IterativeVAE: layers are traced one by one."""
    return EVERY_FAMILY[family](encoder_layers=1, decoder_layers=2 if family == "iterative_vae" else 1, **fields)


def compiles_with_labels(family: str, folder: Path) -> None:
    """The loss of evaluation, and loss and gradient of training without dropout, whose draws differ in a graph.

    There is no padding, for whose positions only a graph of IterativeVAE draws noise. The backend "eager" would draw
    other noise for the gradient than for the loss.
    """
    rates = {"dropout": 0.0}
    if family == "iterative_vae":
        rates["latent_dropout"] = 0.0
    model = shallow(family, **rates)
    batch = batch_of(5, 5, 5)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(**batch).loss, model(**batch).loss, **FLOAT32)
    model.train()
    results = []
    for forward in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(0)
        loss = forward(**batch).loss
        results.append((loss, *torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)))
    torch.testing.assert_close(results[1], results[0], **FLOAT32)


def compiles_without_labels(family: str, folder: Path) -> None:
    model = shallow(family)
    batch = target_of(family, batch_of(5, 3, 4))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_equal_at_tokens(compiled(**batch).logits, model(**batch).logits, batch["decoder_attention_mask"])


def learns(family: str, folder: Path, config: PeftConfig) -> None:
    """An adapter learns a batch, and gives the same results loaded onto the model; LoRA also merged into it."""
    batch = batch_of(5, 3, 4)
    adapter: Any = get_peft_model(EVERY_FAMILY[family]().double(), copy.deepcopy(config)).train()
    optimizer = torch.optim.Adam([weight for weight in adapter.parameters() if weight.requires_grad], lr=0.05)
    losses = []
    for _ in range(5):
        torch.manual_seed(0)
        losses.append(adapter(**batch).loss)
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    adapter.eval().save_pretrained(str(folder))
    assert_same_answers(PeftModel.from_pretrained(EVERY_FAMILY[family]().double(), str(folder)).eval(), adapter, batch)
    if isinstance(config, LoraConfig):
        assert_same_answers(adapter.merge_and_unload(), adapter, batch)


SEQ_2_SEQ = TaskType.SEQ_2_SEQ_LM
LORA = LoraConfig(task_type=SEQ_2_SEQ, r=4, target_modules=["q_proj", "v_proj"])


def mixes_adapters(family: str, folder: Path) -> None:
    """A batch with a different adapter for each text has the tokens of each text and adapter alone."""
    base: Any = with_normal_weights(EVERY_FAMILY[family]().double(), 0)
    config = LoraConfig(task_type=SEQ_2_SEQ, r=4, target_modules=["q_proj", "v_proj", "fc1"], init_lora_weights=False)
    adapted: Any = get_peft_model(base, config, adapter_name="first")
    adapted.add_adapter("second", config)
    for name, weight in adapted.eval().named_parameters():
        if "lora_" in name:
            weight.data.normal_()  # adapters that change the tokens
    batch = source_batch([6, 4, 5])
    names = ["first", "__base__", "second"]
    rotated = [*names[1:], names[0]]
    pad = base.config.pad_token_id

    def words_of(tokens: Tensor) -> list[list[int]]:
        return [[token for token in row if token != pad] for row in tokens.tolist()]

    searches: list[dict[str, Any]] = [{}]
    if family == "autoregressive":  # every second token ends a text
        searches = [{"num_beams": k, "eos_token_id": list(range(2, base.config.vocab_size, 2))} for k in (1, 3)]
    elif family == "dag":  # long paths
        searches = [{"decoding_strategy": "viterbi", "length_penalty": 9.0}]
    for search in searches:
        together, other = (
            adapted.generate(**batch, **search, adapter_names=adapters, max_new_tokens=9)
            for adapters in (names, rotated)
        )
        for mine, wrong in zip(words_of(together), words_of(other), strict=True):
            assert mine != wrong  # otherwise a wrong adapter might have the same tokens
        for row, name in enumerate(names):
            one = {key: value[row : row + 1] for key, value in batch.items()}
            adapted.set_adapter("first" if name == "__base__" else name)
            with adapted.disable_adapter() if name == "__base__" else contextlib.nullcontext():
                alone = adapted.generate(**one, **search, max_new_tokens=9)
            end = alone.shape[1]
            assert torch.equal(together[row : row + 1, :end], alone)
            assert bool((together[row, end:] == pad).all())


def has_dtypes(family: str, folder: Path) -> None:
    """A saved dtype, and loading in one, give what `.to()` gives, near float32."""
    batch = batch_of(5, 3, 4)
    EVERY_FAMILY[family]().save_pretrained(folder)
    loss = EVERY_FAMILY[family]()(**batch).loss
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = EVERY_FAMILY[family]().to(dtype)
        model.save_pretrained(folder / "converted")
        for path, settings in ((folder, {"dtype": dtype}), (folder / "converted", {})):
            again = AutoModelForSeq2SeqLM.from_pretrained(path, **settings)
            kept = {name: weight.dtype for name, weight in again.named_parameters()}
            assert again.dtype == dtype
            assert kept == {name: weight.dtype for name, weight in model.named_parameters()}
            assert_same_weights(again, model)
        torch.testing.assert_close(model(**batch).loss.float(), loss, rtol=0.05, atol=0)


def saves_and_loads(family: str, folder: Path) -> None:
    for size in ("1GB", "20KB"):
        EVERY_FAMILY[family]().save_pretrained(folder / size, max_shard_size=size)
        again = AutoModelForSeq2SeqLM.from_pretrained(folder / size)
        assert type(again) is type(EVERY_FAMILY[family]())
        assert_same_weights(again, EVERY_FAMILY[family]())
        assert_same_answers(again.double(), EVERY_FAMILY[family]().double(), batch_of(5, 3, 4))
    assert len(list((folder / "20KB").glob("*.safetensors"))) > 2


def publish(family: str, folder: Path) -> Path:
    model, tokenizer = family_of_pairs(family)
    return save(folder, model.with_remote_code(), tokenizer.with_remote_code())


@functools.cache
def results_without_the_package() -> dict[str, list]:
    """Return the results of each family's published model in a process that cannot import the package."""
    with tempfile.TemporaryDirectory() as name:
        folders = [publish(family, Path(name) / family) for family in EVERY_FAMILY]
        results = load_without_the_package(Path(name) / "home", *((str(folder), "main") for folder in folders))
    return dict(zip(EVERY_FAMILY, results, strict=True))


def carries_its_code(family: str, folder: Path) -> None:
    """A pipeline made by the code alone has the same results too."""
    assert_same_results(results_without_the_package()[family], publish(family, folder / family))


def makes_a_pipeline(family: str, folder: Path) -> None:
    model, tokenizer = family_of_pairs(family)
    model, texts = model.double(), list(PAIRS)
    tokens = model.generate(**tokenizer(texts, padding=True, return_tensors="pt"), max_new_tokens=9)
    records = pipeline(TASK, model=model, tokenizer=tokenizer, device="cpu")(texts, batch_size=6, max_new_tokens=9)
    expected = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    assert [record["translation_text"] for record in records] == expected


def torch_exported(module: nn.Module, inputs: dict[str, Any], strict: bool = False) -> torch.export.ExportedProgram:
    """Return the program of a module for any number of rows and any lengths of source and target."""
    rows, source, target = (torch.export.Dim(name, min=2, max=64) for name in ("rows", "source", "target"))
    shapes = {
        name: {0: rows, 1: target if name.startswith("decoder") else source} if isinstance(value, Tensor) else None
        for name, value in inputs.items()
    }
    return torch.export.export(module, (), inputs, dynamic_shapes=shapes, strict=strict)


def exports_to_onnx(family: str, folder: Path) -> None:
    to_onnx(EVERY_FAMILY[family](encoder_layers=1, decoder_layers=1), None, folder / "converted")


def exports_by_torch(family: str, folder: Path) -> None:
    model = shallow(family).requires_grad_(False)
    batch, other = (target_of(family, batch_of(*lengths)) for lengths in ((5, 3, 4), (9, 2, 7)))
    logits = torch_exported(model, batch | {"use_cache": False}).module()(**other, use_cache=False).logits
    assert_equal_at_tokens(logits, model(**other).logits, other["decoder_attention_mask"])


def exports_to_ctranslate2(family: str, folder: Path) -> None:
    model = EVERY_FAMILY[family]()
    assert_same_probabilities(model, to_ctranslate2(model, None, folder / "converted"))


def accepts_no_cache(family: str, folder: Path) -> None:
    model, batch = EVERY_FAMILY[family](), batch_of(5, 3, 4)
    assert torch.equal(model(**batch, past_key_values=None, cache=None).loss, model(**batch).loss)


PROMISES: dict[str, Callable[[str, Path], None]] = {
    "`device_map`: CPU offload": offloads_to_the_cpu,
    "`device_map`: disk offload": offloads_to_the_disk,
    "`torch.compile(fullgraph=True)` with labels": compiles_with_labels,
    "`torch.compile(fullgraph=True)` without labels": compiles_without_labels,
    "PEFT: LoRA": partial(learns, config=LORA),
    "PEFT: an adapter for each text (`adapter_names`)": mixes_adapters,
    "PEFT: prompt tuning": partial(learns, config=PromptTuningConfig(task_type=SEQ_2_SEQ, num_virtual_tokens=4)),
    "PEFT: prefix tuning": partial(learns, config=PrefixTuningConfig(task_type=SEQ_2_SEQ, num_virtual_tokens=4)),
    "float32, bfloat16, float16": has_dtypes,
    "saving and loading, also in shards": saves_and_loads,
    "loading with the code in its repository": carries_its_code,
    "`pipeline`": makes_a_pipeline,
    "ONNX": exports_to_onnx,
    "`torch.export`": exports_by_torch,
    "CTranslate2": exports_to_ctranslate2,
    "`past_key_values=None` in a call": accepts_no_cache,
}
SLOW = (
    *(compiles_with_labels, compiles_without_labels, has_dtypes, carries_its_code),
    *(exports_to_onnx, exports_by_torch, exports_to_ctranslate2),
)
NO_CACHE = r"^past_key_values: Vaswani\w+ predicts all words at once .* PREFIX_TUNING needs a cache; use LORA or PROMPT"
ONLY_THE_PAPERS_MODEL = r"^A Vaswani\w+ is not a VaswaniTransformerForConditionalGeneration, the only model"
# The errors in place of a promise; None: it may work and is not tested.
NOT_GIVEN: dict[str, dict[str, str | None]] = {
    "`torch.compile(fullgraph=True)` with labels": dict.fromkeys(SLOT_FAMILY),
    "PEFT: prefix tuning": dict.fromkeys(NAR, NO_CACHE),
    "PEFT: an adapter for each text (`adapter_names`)": dict.fromkeys(
        ("nat", "iterative_vae", "flowseq"), r"^adapter_names: cannot differ by row in .* expected one adapter\."
    ),
    "ONNX": dict.fromkeys(NAR, ONLY_THE_PAPERS_MODEL),
    "`torch.export`": dict.fromkeys(NAR),
    "CTranslate2": dict.fromkeys(NAR, ONLY_THE_PAPERS_MODEL),
}
CELLS = [
    pytest.param(promise, family, marks=[pytest.mark.slow] if PROMISES[promise] in SLOW else [])
    for promise in PROMISES
    for family in EVERY_FAMILY
    if NOT_GIVEN.get(promise, {}).get(family, "tested") is not None
]


@pytest.mark.parametrize(("promise", "family"), CELLS)
def test_promise_holds_or_is_an_error_of_one_line(promise: str, family: str, tmp_path: Path) -> None:
    torch.compiler.reset()
    if (message := NOT_GIVEN.get(promise, {}).get(family)) is None:
        PROMISES[promise](family, tmp_path)
        return
    with pytest.raises(ValueError, match=message) as error:
        PROMISES[promise](family, tmp_path)
    assert "\n" not in str(error.value)


def test_table_of_the_page_lists_the_promises() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    lines = page.partition("## What works with what")[2].partition("| --- |")[2].partition("\n\n")[0].splitlines()[1:]
    plain = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", line) for line in lines]  # without links
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in plain] == [
        [promise, *("no" if family in NOT_GIVEN.get(promise, {}) else "yes" for family in EVERY_FAMILY)]
        for promise in PROMISES
    ]
