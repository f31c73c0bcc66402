"""Kinds of model in a recipe: their fields, the operations of a step, its random choices, optimizer and glancing."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers import Batch, load_tokenizer, random_tokens, tiny_model, user_error
from tests.nar_models import FAMILY, tiny_nat
from training.data.tokenizing import token_ids
from training.recipe.families import FAMILIES, family_of
from training.recipe.fields import TrainingRecipe, load_recipe, to_dict
from training.recipe.flops import frozen_teacher_flops
from training.trainer.draws import add_masks, pair_draws
from training.trainer.energy import Energy
from training.trainer.optimizers import make_optimizer, make_schedule
from vaswani_transformer import VaswaniTransformerTokenizer, latent

NAT, CMLM, VAE, FLOWSEQ = (f"model.kind={kind}" for kind in ("nat", "cmlm", "iterative_vae", "flowseq"))


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "own.yaml"
    path.write_text("data: {kind: grammar}", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("model.kind=rnn", r"model\.kind: 'rnn' is not one of autoregressive, nat, cmlm"),
        ("model.kind=cml", r"model\.kind: 'cml' is not one of .*\. Did you mean cmlm\?$"),
        (
            f"{NAT} decoding.num_beams=4 decoding.length_penalty=1.0",
            r"decoding\.num_beams, decoding\.length_penalty: a model of kind nat has no such field, .* leave them "
            r"out \(--decoding\.num_beams=null --decoding\.length_penalty=null\), or set model\.kind",
        ),
        ("decoding.length_beam_size=2", r"decoding\.length_beam_size: .* nat or cmlm or iterative_vae or flowseq has"),
        ("training.kl_scale=1", r"training\.kl_scale: a model of kind autoregressive has no such field, kind iter"),
        ("training.decoder_steps=1", r"training\.decoder_steps: a model of kind autoregressive has no such"),
        ("training.energy_from=x", r"training\.energy_from: a model of kind autoregressive has no such"),
        ("training.glancing=[0.5,0.3]", r"training\.glancing: a model of kind autoregressive has no such"),
        (f"{NAT} decoding.num_iterations=4", r"decoding\.num_iterations: a model of kind nat has no such"),
        (f"{NAT} decoding.num_latent_samples=2", r"decoding\.num_latent_samples: a model of kind nat has no such"),
        (f"{NAT} training.evaluation_beams=2", r"training\.evaluation_beams: a model of kind nat has no such"),
        (f"{CMLM} training.glancing=[0.5,0.3]", r"training\.glancing: a model of kind cmlm has no such"),
        ("model.mask_diagonal=false", r"model\.mask_diagonal: no such key; a model has "),
        (f"{NAT} model.max_target_length=9", r"model\.max_target_length: no such key; a model has "),
        (f"{FLOWSEQ} model.relative_attention_clip=4", r"model\.relative_attention_clip: no such key; a model has "),
        (f"{NAT} training.glancing=[0.5,1.1]", r"training\.glancing: expected two shares from 0 to 1, got \[0\.5, 1"),
        (f"{NAT} training.glancing=[-0.1,0]", r"training\.glancing: expected two shares from 0 to 1, got"),
        (f"{NAT} training.glancing=[0.5]", r"training\.glancing: expected two shares from 0 to 1, got \[0\.5\]"),
        (f"{NAT} training.glancing=[a,true]", r"training\.glancing: expected two shares from 0 to 1, got"),
        (f"{NAT} training.glancing=[.nan,0]", r"training\.glancing: expected a finite number, got nan"),
        (f"{NAT} training.glancing=0.5", r"training\.glancing: expected list or null, got 0\.5"),
        (f"{NAT} training.glancing_steps=0", r"training\.glancing_steps: 0 is not positive"),
        (f"{NAT} training.glancing_steps=5", r"training\.glancing_steps: .* since training\.glancing is null; leave"),
        (f"{NAT} model.min_length_difference=3", r"model: .*must enclose 0"),
        (f"{CMLM} model.mask_token_id=3", r"model\.mask_token_id: the tokenizer sets it"),
        (f"{CMLM} decoding.num_iterations=0", r"decoding\.num_iterations: 0 is not positive"),
        (f"{CMLM} training.energy_inputs=hard", r"training\.energy_inputs: 'hard' is not one of softmax, straight"),
        (
            f"{CMLM} training.energy_inputs=softmax",
            r"training\.energy_inputs: .* out \(--training\.energy_inputs=null\), or set training\.energy_from\.",
        ),
        ("training.start_from=a training.encoder_from=b", r"training\.start_from: .* encoder; leave training\.enc"),
        ("training.optimizer=adam", r"training\.optimizer: 'adam' is not one of paper, radam"),
        (
            "training.weight_decay=0.1 training.learning_rate=0.1",
            r"training\.learning_rate, training\.weight_decay: without effect, since training\.optimizer is paper",
        ),
        ("training.optimizer=radam training.warmup_steps=9", r"training\.warmup_steps: without effect, since"),
        (f"{VAE} training.kl_scale=-1", r"training\.kl_scale: -1 is negative; give 0 or more"),
        (f"{VAE} training.kl_warmup_steps=-1", r"training\.kl_warmup_steps: -1 is negative; give 0 or more"),
        (f"{VAE} model.latent_sample=soft", r"model: .*'soft' is not a sample of a latent; choose 'discrete' or 'rel"),
        (f"{VAE} model.kl_weights=[1.0]", r"model: .*kl_weights .* must be 5 finite numbers"),
        (f"{FLOWSEQ} training.decoder_steps=-1", r"training\.decoder_steps: -1 is negative; give 0 or more"),
        (f"{FLOWSEQ} training.steps=100", r"training\.decoder_steps: no step is left for the prior; got 30000 of 100"),
        (f"{FLOWSEQ} training.kl_scale=0", r"training\.kl_scale: at 0 the prior learns nothing; got 0, expected m"),
        (f"{FLOWSEQ} decoding.num_latent_samples=4", r"decoding\.num_latent_samples: at temperature 0 all latents"),
        (f"{FLOWSEQ} decoding.latent_temperature=-1", r"decoding\.latent_temperature: -1 is negative; give 0 or more"),
    ],
)
def test_field_that_a_kind_lacks_is_an_error_of_one_line(recipe_file: Path, fields: str, message: str) -> None:
    with user_error(f"^{message}"):
        load_recipe(recipe_file, [f"--{field}" for field in fields.split()])


@pytest.mark.parametrize("kind", FAMILIES)
def test_saved_recipe_has_the_fields_of_its_kind_only_and_loads_as_the_same(recipe_file: Path, kind: str) -> None:
    glancing = ["--training.glancing=[0.5, 0.3]", "--training.steps=7"] if kind == "nat" else []
    kl_scale = ["--training.kl_scale=0.1"] if kind in ("iterative_vae", "flowseq") else []
    recipe = load_recipe(recipe_file, [f"--model.kind={kind}", *glancing, *kl_scale])
    tree = to_dict(recipe)
    assert tree["decoding"] == recipe.search
    assert tree["model"].get("kind", "autoregressive") == kind
    assert tree["training"].get("glancing_steps") == (7 if glancing else None)
    assert tree["training"].items() >= FAMILIES[kind].defaults.items()
    assert tree["training"].get("kl_scale") == (0.1 if kl_scale else None)
    recipe_file.write_text(yaml.safe_dump(tree))
    assert to_dict(load_recipe(recipe_file, [])) == tree


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_kind_is_found_by_its_models_configuration(kind: str) -> None:
    model = FAMILY[kind]() if kind in FAMILY else tiny_model()
    assert family_of(model.config) is FAMILIES[kind]
    assert FAMILIES[kind].model_class is type(model)
    assert FAMILIES[kind].is_autoregressive == (kind == "autoregressive")


def eager(model: Any) -> Any:
    model.set_attn_implementation("eager")
    return model.train()


def unpadded_batch() -> Batch:
    return {"input_ids": random_tokens(3, 7), "attention_mask": torch.ones(3, 7).long(), "labels": random_tokens(3, 5)}


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("autoregressive", {}),
        ("autoregressive", {"d_k": 16, "d_v": 5}),
        ("autoregressive", {"tie_word_embeddings": False, "attention_bias": True}),
        ("autoregressive", {"encoder_layers": 1}),
        ("nat", {}),
        ("nat", {"d_k": 16, "d_v": 5, "relative_attention_clip": None}),
        ("cmlm", {}),
        ("iterative_vae", {"decoder_layers": 3}),
        ("iterative_vae", {"decoder_layers": 3, "hint": False}),
        ("iterative_vae", {"decoder_layers": 3, "hint": False, "latent_sample": "relaxed"}),
        ("flowseq", {}),
        ("flowseq", {"d_k": 16, "d_v": 5}),
    ],
    ids=str,
)
def test_flops_are_those_that_torch_counts_but_for_the_positions(
    kind: str, overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no recomputation. Positional queries and keys are computed once a batch: forward, and weights backward.

    FlowSeq has readers, whose queries are positional, of width 32 in the decoder and 16 in the flow. Every token of
    CMLM's batch is masked, because torch projects all. The batch has no padding, which torch would count, attention is
    eager, because torch lacks some fused products, and the loss comes from logits, because torch does not count a
    product that is written into given memory. Neither count has biases, softmax or anything else than matrix products.
    """
    monkeypatch.setattr(latent, "checkpoint", lambda run, *inputs, use_reentrant: run(*inputs))
    model, batch = eager((FAMILY | {"autoregressive": tiny_model})[kind](**overrides)), unpadded_batch()
    config = model.config
    if kind == "flowseq":
        positions = 4 * config.num_heads * 5 * (32 * config.head_dim + 16 * (overrides.get("d_k") or 4))
    elif kind in ("autoregressive", "cmlm"):
        positions = 0
    else:
        positions = 4 * config.decoder_layers * 2 * config.num_heads * config.head_dim * 32 * 5
    if kind == "cmlm":
        batch = add_masks(batch, torch.full((3, 6), 0.999), 3, 1)
    with FlopCounterMode(display=False) as counter:
        model(**batch, skip_logits=False).loss.backward()
    assert FAMILIES[kind].flops(model, batch) == counter.get_total_flops() - positions


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [("nat", {}), ("iterative_vae", {}), ("iterative_vae", {"latent_sample": "relaxed"})],
    ids=str,
)
def test_flops_of_glancing_are_one_more_pass_of_the_decoder(kind: str, overrides: dict[str, Any]) -> None:
    model = eager(FAMILY[kind](**overrides))
    batch = unpadded_batch()
    plain, positions = FAMILIES[kind].flops(model, batch), 2 * 2 * 2 * 32 * 32 * 5
    model.glancing_ratio = 0.5
    states = model.read_source(model.encode(batch["input_ids"]).last_hidden_state, None)
    with FlopCounterMode(display=False) as counter:
        model.glance(states, torch.randn(3, 5, 32), batch["labels"])
    assert FAMILIES[kind].flops(model, batch) - plain == counter.get_total_flops() - positions


@pytest.mark.parametrize("overrides", [{}, {"d_k": 16, "d_v": 5}, {"encoder_layers": 1}], ids=str)
def test_flops_of_a_frozen_teacher_are_those_that_torch_counts(overrides: dict[str, Any]) -> None:
    teacher, batch = eager(tiny_model(**overrides)), unpadded_batch()
    logits, is_real = torch.randn(3, 5, 100, requires_grad=True), batch["labels"].ne(-100)
    with FlopCounterMode(display=False) as counter:
        Energy(teacher)(logits, is_real, batch["input_ids"], batch["attention_mask"]).sum().backward()
    assert frozen_teacher_flops(teacher, batch) == counter.get_total_flops()


def pairs(*rows: tuple[list[int], list[int]]) -> dict[str, Tensor]:
    """Return a batch of pairs of token lists, padded on the right."""
    sources, targets = zip(*rows, strict=True)
    width, length = (max(map(len, side)) for side in (sources, targets))
    return {
        "input_ids": torch.tensor([row + [1] * (width - len(row)) for row in sources]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in sources]),
        "labels": torch.tensor([row + [-100] * (length - len(row)) for row in targets]),
    }


def test_pairs_draws_depend_on_seed_step_and_pair_only() -> None:
    """Its batch and their order change nothing; another seed, step or pair has other draws."""
    first, second = ([5, 6, 2], [7, 8, 9, 2]), ([5, 2], [7, 2])
    single, together = pair_draws(pairs(second), 1, 4), pair_draws(pairs(first, second), 1, 4)
    assert torch.equal(single[0], together[1, :3])
    assert not bool(together[1, 3:].any())
    others = [pair_draws(pairs(second), *numbers) for numbers in ((2, 4), (1, 5), (4, 1))]
    for pair in (([5, 3], [7, 2]), ([2, 5], [7, 2]), ([5, 2], [2, 7]), ([7, 2], [5, 2])):
        others.append(pair_draws(pairs(pair), 1, 4))
    for other in others:
        assert not bool((single == other).any())


def test_pairs_draws_are_uniform_and_not_correlated() -> None:
    """100,000 numbers: a tenth of them is 10,000, standard deviation 95; a correlation has one of 0.003."""
    batch = pairs(*(([5 + row, 2], [7] * 99) for row in range(1000)))
    draws = pair_draws(batch, 1, 4)
    assert draws.min() >= 0
    assert draws.max() < 1
    assert bool((draws.histc(10, 0, 1) - 10_000).abs().le(5 * 95).all())
    for first, second in ((draws[:, 1:], draws[:, :-1]), (draws[1:], draws[:-1])):
        assert abs(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]) < 5 * 0.0032


def test_draws_leave_torchs_random_numbers_as_they_are() -> None:
    before = torch.get_rng_state()
    batch = pairs(([5, 6, 2], [7, 8, 9, 2]), ([5, 2], [7, 2]))
    add_masks(batch, pair_draws(batch, 1, 4), 3, 1)
    assert torch.equal(before, torch.get_rng_state())


def test_masks_of_draws_are_uniform_in_number() -> None:
    """k of 4 is each of 1 to 4 in a quarter of 1,000 steps: 250, standard deviation 14."""
    batch, counts = pairs(([5, 6, 2], [7, 8, 9, 2])), torch.zeros(5, dtype=torch.long)
    for step in range(1000):
        masked = add_masks(batch, pair_draws(batch, 1, step), 3, 1)
        is_masked = masked["decoder_input_ids"] == 3
        assert torch.equal(is_masked, masked["labels"] != -100)
        counts[is_masked.sum()] += 1
    assert counts[0] == 0
    assert bool((counts[1:] - 250).abs().le(5 * 14).all())
    assert masked["target_lengths"].tolist() == [4]


def test_left_padded_labels_are_an_error() -> None:
    batch = pairs(([5, 6, 2], [7, 8, 9, 2]), ([5, 2], [7, 2]))
    batch["labels"] = torch.tensor([[7, 8, 9, 2], [-100, -100, 7, 2]])
    with pytest.raises(ValueError, match=r"^labels: a target must begin at the first position; got row 1 with a token"):
        add_masks(batch, torch.zeros(2, 5), 3, 1)


def test_glancing_shows_the_positions_with_the_smallest_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every prediction is token 0, which is wrong."""
    model = tiny_nat().train()
    predict_zero = torch.nn.Linear(32, 99)
    torch.nn.init.zeros_(predict_zero.weight)
    predict_zero.bias.data = torch.eye(99)[0]
    monkeypatch.setattr(model, "lm_head", predict_zero)
    source = model.read_source(model.encode(random_tokens(1, 6)).last_hidden_state, None)
    draws, labels, inputs = torch.tensor([[0.9, 0.1, 0.5, 0.2]]), random_tokens(1, 4), torch.randn(1, 4, 32)
    for ratio, shown in ((0.25, [0, 1, 0, 0]), (0.5, [0, 1, 0, 1]), (1.0, [1, 1, 1, 1])):
        model.glancing_ratio = ratio
        seen, _ = model.glance(source, inputs, labels, draws)
        assert seen.long().tolist() == [shown]


def test_draws_of_a_batch_reach_glancing() -> None:
    model = tiny_nat(dropout=0.0).train()
    model.glancing_ratio = 0.5
    batch = pairs(([5, 6, 2], [7, 8, 9, 2]), ([5, 2], [7, 2]))
    draws = [{**batch, "glancing_draws": pair_draws(batch, 1, step)[:, 1:]} for step in (0, 0, 1)]
    losses = [model(**one).token_loss.item() for one in draws]
    assert losses[0] == losses[1] != losses[2]


def test_radam_moves_weights_as_torchs_does_and_decays_rate_and_weights() -> None:
    """Of two weights, the one without a gradient shrinks by rate times decay; the rate halves in two steps."""
    training = TrainingRecipe(
        optimizer="radam", learning_rate=0.1, weight_decay=0.5, learning_rate_decay=0.5, learning_rate_decay_steps=2
    )
    weight = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
    optimizer = make_optimizer(training, [weight])
    schedule, rates = make_schedule(training, optimizer, 32), []
    for _ in range(5):
        weight.grad = torch.tensor([0.0, 1.0])
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.1 * 0.5 ** (step / 2) for step in range(5)])
    assert float(weight[0].detach()) == pytest.approx(torch.tensor([1 - 0.5 * rate for rate in rates]).prod().item())
    assert float(weight[1].detach()) < float(weight[0].detach())


@pytest.mark.parametrize(
    ("kind", "algorithm", "suppressed"),
    [(NAT, "wordpiece", [3]), (CMLM, "wordpiece", [3]), (NAT, "bpe", None), ("seed=1", "wordpiece", None)],
)
def test_parallel_model_of_a_recipe_never_predicts_the_unknown_word(
    recipe_file: Path, kind: str, algorithm: str, suppressed: list[int] | None
) -> None:
    """In evaluations, in the saved settings, and in scores."""
    recipe = load_recipe(recipe_file, [f"--{kind}"])
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(["a mask"] * 9, 280, algorithm)
    for in_training in (False, True):
        assert recipe.generation_config(tiny_nat().config, tokenizer, in_training).suppress_tokens == suppressed


def test_mask_token_in_a_text_stays_text_and_an_added_one_moves_no_id(tmp_path: Path) -> None:
    tokenizer = VaswaniTransformerTokenizer.train_from_iterator(["a mask"], vocab_size=270)
    before = tokenizer.get_vocab()
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.get_vocab() == before | {"<mask>": len(before)}
    sources, targets = token_ids(again, ["a <mask>"], ["<mask>"])
    assert again.mask_token_id not in sources[0] + targets[0]
    assert again.decode(sources[0], skip_special_tokens=True) == "a <mask>"
