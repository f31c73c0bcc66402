"""`generate()` of NAT and CMLM against plain Python: lengths, Mask-Predict, scores, settings and errors.

B batch, S source, T target.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, GenerationConfig

from tests.helpers import padded_batch, random_tokens, tiny_model
from tests.nar_models import END, FAMILY, MASK, targets, tiny_cmlm, tiny_nat
from vaswani_transformer.nar_generation import SUPPORTED, default_settings

BANNED = {0, 1, END, MASK}


def best_words(logits: Tensor, length: int) -> tuple[list[int], list[float]]:
    """Return the likeliest words of logits (T, V), with the end last, and their log-probabilities."""
    log_probs = logits.log_softmax(-1).tolist()
    words = [
        END if i == length - 1 else max((v for v in range(len(row)) if v not in BANNED), key=row.__getitem__)
        for i, row in enumerate(log_probs[:length])
    ]
    return words, [log_probs[i][word] for i, word in enumerate(words)]


def mask_predict(model: Any, source: Tensor, length: int, rounds: int) -> tuple[list[list[int]], list[float]]:
    """Return the words after each iteration of Mask-Predict on one sentence, and the last log-probabilities."""
    words, scores, history = [MASK] * length, [0.0] * length, []
    for t in range(rounds):
        count = max(1, length * (rounds - t) // rounds) if t else length
        masked = sorted(range(length), key=lambda i: (scores[i], i))[:count] if t else list(range(length))
        for i in masked:
            words[i] = MASK
        logits = model(input_ids=source, decoder_input_ids=torch.tensor([words])).logits[0]
        new, new_scores = best_words(logits, length)
        for i in masked:
            words[i], scores[i] = new[i], new_scores[i]
        history.append(list(words))
    return history, scores


@torch.no_grad()
@pytest.mark.parametrize("seed", [*range(15), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(15, 300))])
def test_mask_predict_equals_plain_python(seed: int) -> None:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"vocab_size": 12, "d_model": 8, "num_heads": 2, "d_ff": 8, "max_target_length": 9}
    model: Any = tiny_cmlm(**sizes, encoder_layers=1, decoder_layers=1).double()  # such weights amplify rounding
    for weight in model.parameters():
        weight.data.normal_()  # sharper than at the start of training, so that iterations change words
    tokens, mask = padded_batch([4, 2], "left")
    tokens = tokens.clamp(max=11)
    rounds, lengths = seed % 5 + 1, seed % 3 + 1
    settings: dict[str, Any] = {"num_iterations": rounds, "length_beam_size": lengths, "return_history": True}
    generated = model.generate(tokens, attention_mask=mask, **settings, return_dict_in_generate=True)
    for row in range(2):
        source = tokens[row, mask[row].bool()][None]
        logits = model.read_source(model.encode(source).last_hidden_state, None).length_logits[0]
        candidates = logits.argsort(descending=True)[:lengths].tolist()
        results = [(*mask_predict(model, source, m, rounds), m) for m in candidates]
        log_lengths = logits.log_softmax(0).tolist()
        ranks = [(sum(scores) + log_lengths[m]) / m for _, scores, m in results]
        history, scores, m = results[ranks.index(max(ranks))]
        assert generated.sequences[row, 1 : m + 1].tolist() == history[-1]
        assert [step[row, 1 : m + 1].tolist() for step in generated.history] == history
        assert generated.lengths[row] == m
        expected = torch.tensor(scores, dtype=torch.float64)
        torch.testing.assert_close(generated.token_scores[row, :m], expected, rtol=1e-9, atol=1e-9)
        assert generated.sequences_scores[row].item() == pytest.approx(max(ranks), rel=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("settings", [{}, {"length_weight": 0}, {"length_penalty": 0.4, "length_weight": 2.5}], ids=str)
def test_nat_finds_the_best_length_of_all(settings: dict[str, float]) -> None:
    """The oracle computes each length of every sentence separately, by forward, and ranks them by the rule."""
    model: Any = tiny_nat(min_length_difference=-3, max_length_difference=4).double()
    source = random_tokens(4, 5)
    model.config.mask_token_id = MASK  # NAT has no such token, but the reference bans it
    for weight in model.length_difference.parameters():
        weight.data.mul_(8)  # lengths that matter
    generated: Any = model.generate(source, length_beam_size=8, return_dict_in_generate=True, **settings)
    alpha, weight = (settings.get(name, 1.0) for name in ("length_penalty", "length_weight"))
    log_lengths = model.read_source(model.encode(source)[0], None).length_logits.log_softmax(-1)  # (B, 8)
    for row in range(4):
        results = []
        for m in range(2, 10):
            logits = model(input_ids=source[row][None], decoder_attention_mask=torch.ones(1, m)).logits[0]
            words, scores = best_words(logits, m)
            results.append(((sum(scores) + weight * float(log_lengths[row, m - 2])) / m**alpha, words))
        score, words = max(results)
        assert generated.sequences[row, 1 : len(words) + 1].tolist() == words
        assert generated.sequences_scores[row].item() == pytest.approx(score)


@pytest.mark.parametrize("family", FAMILY)
def test_sequences_begin_with_the_start_and_end_with_the_end(family: str) -> None:
    generated = FAMILY[family]().generate(random_tokens(6, 5), length_beam_size=3, return_dict_in_generate=True)
    for row, m in enumerate(generated.lengths.tolist()):
        tokens = generated.sequences[row].tolist()
        assert tokens[0] == 0
        assert tokens[m] == END
        assert not BANNED.intersection(tokens[1:m]) - (set() if family == "cmlm" else {MASK})
        assert set(tokens[m + 1 :]) <= {1}
        assert generated.token_scores[row, m:].tolist() == [0.0] * (generated.token_scores.shape[1] - m)
    assert generated.sequences.shape[1] == int(generated.lengths.max()) + 1


@pytest.mark.parametrize("family", FAMILY)
def test_several_targets_of_a_source_come_best_first(family: str) -> None:
    model, source = FAMILY[family](), random_tokens(3, 5)
    settings: dict[str, Any] = {"length_beam_size": 5, "return_dict_in_generate": True}
    all_five = model.generate(source, num_return_sequences=5, **settings)
    scores = all_five.sequences_scores.view(3, 5)
    assert torch.equal(scores, scores.sort(dim=1, descending=True).values)
    best = model.generate(source, **settings)
    assert torch.equal(best.sequences_scores, scores[:, 0])
    assert torch.equal(best.lengths, all_five.lengths.view(3, 5)[:, 0])


def test_suppressed_tokens_are_never_predicted() -> None:
    model: Any = tiny_nat()
    source = random_tokens(4, 9)
    plain = model.generate(source, length_beam_size=9)
    words = sorted(set(plain.flatten().tolist()) - BANNED)
    generated = model.generate(source, length_beam_size=9, suppress_tokens=words)
    assert not set(words) & set(generated.flatten().tolist())


def long_target_model(family: str) -> Any:
    """Return a model whose targets have 30 tokens or more without a limit; the autoregressive one never ends."""
    if family == "nat":
        model = tiny_nat(max_length_difference=40)
        model.length_difference.proj.bias.data[-1] = 1e4
    elif family == "cmlm":
        model = tiny_cmlm(max_target_length=40)
        model.length_token.weight.data[1:40] = 0
    else:
        model = tiny_model(tie_word_embeddings=False)
        model.lm_head.weight.data[END] = -10 * model.lm_head.weight.data.abs().max()
    return model


RELATIVE = {"max_source_relative_length": 10}
NONE_GIVEN: dict[str, Any] = {}


@pytest.mark.parametrize("family", ["autoregressive", "nat", "cmlm"])
@pytest.mark.parametrize(
    ("saved", "call", "tokens"),
    [
        ({"max_new_tokens": 5}, NONE_GIVEN, 5),
        ({"max_length": 6}, NONE_GIVEN, 5),
        ({"max_new_tokens": 5}, {"max_length": 9}, 5),  # Transformers takes the first of the two
        ({"max_new_tokens": 5}, {"max_new_tokens": 9}, 9),
        ({"max_length": 6}, {"max_new_tokens": 8}, 8),
        ({"max_length": 6}, {"max_length": 9}, 8),
        ({"max_length": 6}, {"max_length": 20}, 19),
        (RELATIVE, NONE_GIVEN, 15),
        (RELATIVE, {"max_new_tokens": 18}, 18),
        (RELATIVE | {"max_new_tokens": 5}, NONE_GIVEN, 5),
        (RELATIVE | {"max_new_tokens": 5}, {"max_new_tokens": None}, 15),
        (RELATIVE | {"max_length": 6}, NONE_GIVEN, 15),
        ({"max_length": 6}, RELATIVE, 15),
        ({"max_length": 6}, {"generation_config": GenerationConfig(max_length=4)}, 3),
    ],
    ids=str,
)
def test_saved_limits_and_those_of_the_call_hold_alike_in_every_family(
    family: str, saved: dict[str, Any], call: dict[str, Any], tokens: int
) -> None:
    model = long_target_model(family)
    model.generation_config = model.config.make_generation_config(**saved)
    assert model.generate(random_tokens(2, 5), **call).shape[1] == tokens + 1


@pytest.mark.parametrize("family", ["nat", "cmlm"])
def test_defaults_that_a_trainer_saves_shorten_no_target(family: str) -> None:
    """Seq2SeqTrainer writes them into the model's generation config after an evaluation: a max_length of 20."""
    model, source = long_target_model(family), random_tokens(2, 5)
    expected = model.generate(source)
    defaults = GenerationConfig._get_default_generation_params()
    assert expected.shape[1] > defaults["max_length"] == 20
    model.generation_config.update(**defaults, defaults_only=True)
    assert torch.equal(model.generate(source), expected)


@pytest.mark.parametrize("family", FAMILY)
def test_source_relative_length_bounds_each_target_by_its_own_source(family: str) -> None:
    """The limit comes from the call, its configuration or the saved one; the oracle is the lengths without a limit."""
    model, (source, mask) = FAMILY[family](), padded_batch([9, 3, 5], "right")
    if family != "cmlm":  # predicts more tokens than two of the sources have
        model.length_difference.proj.bias.data[-1] = 1e4
    call: dict[str, Any] = {"attention_mask": mask, "return_dict_in_generate": True}
    free = model.generate(source, **call).lengths
    expected = torch.minimum(free, mask.sum(1) + 1)
    assert (expected < free).sum() >= 2
    limit = {"max_source_relative_length": 1}
    for given in (limit, {"generation_config": GenerationConfig(**limit)}):
        assert torch.equal(model.generate(source, **given, **call).lengths, expected)
    model.generation_config.max_source_relative_length = 1
    assert torch.equal(model.generate(source, **call).lengths, expected)
    assert torch.equal(model.generate(source, max_source_relative_length=None, **call).lengths, free)
    assert torch.equal(model.generate(source, max_new_tokens=99, **call).lengths, free)
    both = model.generate(source, max_new_tokens=5, max_source_relative_length=1, **call).lengths
    assert torch.equal(both, expected.clamp(max=5))


def test_settings_are_saved_and_overridden(tmp_path: Path) -> None:
    model, source = tiny_cmlm(), random_tokens(3, 5)
    model.use_mask_predict(4, length_beam_size=3)
    model.save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert (again.generation_config.num_iterations, again.generation_config.length_beam_size) == (4, 3)
    explicit: Any = model.generate(source, GenerationConfig(num_iterations=4, length_beam_size=3))
    assert torch.equal(again.generate(source), explicit)
    call: dict[str, Any] = {"return_dict_in_generate": True, "return_history": True}
    assert len(again.generate(source, **call).history) == 4
    assert len(again.generate(source, num_iterations=2, **call).history) == 2
    config = GenerationConfig(num_iterations=3)
    assert len(again.generate(source, config, **call).history) == 3
    assert len(again.generate(source, config, num_iterations=1, **call).history) == 1


@pytest.mark.parametrize("family", FAMILY)
def test_generate_accepts_a_complete_batch_of_a_trainer(family: str) -> None:
    model, source = FAMILY[family](), random_tokens(3, 5)
    expected = model.generate(source)
    extra: dict[str, Any] = {
        "labels": targets(4, 2, 3),
        "decoder_input_ids": random_tokens(3, 4),
        "target_lengths": torch.ones(3),
    }
    assert torch.equal(model.generate(input_ids=source, synced_gpus=True, **extra), expected)


def test_iterations_encode_once_and_project_the_source_once() -> None:
    model = tiny_cmlm()
    calls: dict[str, int] = {}

    def count(name: str) -> Any:
        return lambda *_: calls.__setitem__(name, calls.get(name, 0) + 1)

    layer: Any = model.model.decoder.layers[0]
    for name, module in {
        "encoder": model.model.encoder,
        "decoder": model.model.decoder,
        "cross keys": layer.cross_attn.k_proj,
        "own keys": layer.self_attn.k_proj,
    }.items():
        module.register_forward_hook(count(name))
    model.generate(random_tokens(3, 5), num_iterations=4, length_beam_size=3)
    assert calls == {"encoder": 1, "decoder": 4, "cross keys": 1, "own keys": 4}


def test_every_setting_of_a_search_from_left_to_right_must_have_its_default() -> None:
    model: Any = tiny_nat()
    defaults = default_settings()
    refused = {name for name in defaults.keys() - SUPPORTED if not name.startswith("_")}
    assert {"num_beams", "length_penalty_type", "early_stopping", "do_sample", "top_k", "max_time"} <= refused
    for name in refused:
        rule = (
            f"{name}: {type(model).__name__} predicts all tokens at once; got 'x', expected {defaults[name]!r}. Leave"
        )
        with pytest.raises(ValueError, match=f"^{re.escape(rule)}"):
            model.generate(random_tokens(2, 5), **{name: "x"})


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("nat", {"max_source_relative_length": -1}, "max_source_relative_length: got -1, expected a whole number"),
        ("cmlm", {"max_source_relative_length": 2.5}, "max_source_relative_length: got 2.5, expected"),
        ("cmlm", {"num_iterations": 2.5}, "num_iterations: got 2.5, expected a whole number"),
        ("nat", {"length_beam_size": True}, "length_beam_size: got True, expected a whole number"),
        (
            "iterative_vae",
            {"do_sample": True, "temperature": 0.5},
            "temperature: .* got 0.5, expected 1.0. Leave it out",
        ),
        ("nat", {"num_beams": 0}, "num_beams: .* got 0, expected 1. Leave it out, or set it to None"),
        ("nat", {"length_penalty": float("inf")}, "length_penalty: got inf, expected a finite number. Give 1.0, or"),
        ("flowseq", {"length_weight": "1"}, "length_weight: got '1', expected a finite number. Give 1.0, or leave"),
        ("nat", {"generation_config": GenerationConfig(num_iteration=4)}, "num_iteration: .* got 4, expected None"),
        ("nat", {"num_latent_samples": 3}, "num_latent_samples: .* has no prior over latents; got 3. Give 1, or"),
        ("iterative_vae", {"latent_temperature": 0.5}, "latent_temperature: .* has no prior over latents; got 0.5"),
        ("flowseq", {"latent_temperature": -1}, "latent_temperature: got -1, expected a finite number of at least 0"),
        ("flowseq", {"latent_temperature": "hot"}, "latent_temperature: got 'hot', expected a finite number"),
        ("flowseq", {"num_latent_samples": 3}, "num_latent_samples: at latent_temperature 0 .* got 3, expected 1"),
        ("flowseq", {"num_latent_samples": 0}, "num_latent_samples: got 0, expected at least 1"),
        ("flowseq", {"do_sample": True}, "do_sample"),
        (
            "flowseq",
            {"num_latent_samples": 2, "latent_temperature": 1.0, "num_return_sequences": 3},
            r"num_return_sequences: got 3, expected 1 to length_beam_size times num_latent_samples \(2\)",
        ),
        ("flowseq", {"num_iterations": 2}, "num_iterations: .* one pass; got 2"),
        ("nat", {"num_iterations": 2}, "num_iterations: .* one pass; got 2"),
        ("iterative_vae", {"num_iterations": 2}, r"num_iterations: .* one pass; got 2\. Give 1"),
        ("cmlm", {"num_iterations": 0}, "num_iterations: got 0, expected at least 1"),
        ("nat", {"length_beam_size": 42}, "length_beam_size: got 42, expected 1 to 41"),
        ("cmlm", {"length_beam_size": 21}, "length_beam_size: got 21, expected 1 to 20"),
        ("cmlm", {"num_return_sequences": 2}, "num_return_sequences: got 2, expected 1 to length_beam_size"),
        ("nat", {"logits_processor": [print]}, "logits_processor"),
        ("nat", {"stopping_criteria": [print]}, "stopping_criteria"),
        ("nat", {"streamer": "a streamer"}, "streamer"),
        ("nat", {"prefix_allowed_tokens_fn": print}, "prefix_allowed_tokens_fn"),
        ("nat", {"custom_generate": print}, "custom_generate"),
        ("nat", {"assistant_model": "another"}, "assistant_model"),
        ("nat", {"assistant_model": torch.nn.Linear(1, 1)}, "assistant_model: .* got Linear"),
        ("nat", {"length_beam_size": 0}, "length_beam_size: got 0, expected 1 to 41, .* Give one in that range"),
        ("nat", {"max_new_tokens": "3"}, "max_new_tokens: got '3', expected a whole number of at least 1"),
        ("cmlm", {"max_new_tokens": 2.5}, "max_new_tokens: got 2.5, expected a whole number of at least 1"),
        ("cmlm", {"max_length": 1}, "max_length: got 1, expected a whole number of at least 2"),
        ("nat", {"suppress_tokens": [99]}, "suppress_tokens: got \\[99\\], expected a list of ids from 0 to 98"),
        ("cmlm", {"suppress_tokens": [-1]}, "suppress_tokens: got \\[-1\\]"),
        ("cmlm", {"suppress_tokens": 5}, "suppress_tokens: got 5"),
        ("cmlm", {"max_new_tokens": 0}, "max_new_tokens"),
        ("cmlm", {"pad_token_id": 5}, "pad_token_id: got 5"),
        ("nat", {"eos_token_id": torch.tensor([END, 5])}, "eos_token_id: got tensor"),
        ("cmlm", {"output_attentions": True}, "output_attentions: generate.. returns scores only; got True"),
        ("nat", {"input_ids": torch.zeros(2, 5)}, "input_ids: got them also as the first argument"),
        ("cmlm", {"number_of_beams": 5}, "number_of_beams: generate.. has no such argument"),
    ],
    ids=str,
)
def test_argument_out_of_its_range_or_of_another_family_is_an_error_of_one_line(
    family: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}") as error:
        FAMILY[family]().generate(random_tokens(2, 5), **settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 1},
        {"do_sample": False},
        {"logits_processor": []},
        {"top_k": 50},
        {"length_penalty_type": "power"},
        {"max_source_relative_length": None},
        {"max_source_relative_length": 300},
        {"length_beam_size": np.int64(1), "num_return_sequences": np.int64(1), "max_new_tokens": np.int64(99)},
        {"output_scores": True, "output_attentions": False, "use_cache": True},
        {"no_repeat_ngram_size": 0, "repetition_penalty": 1, "length_penalty": 1.0, "min_length": 0},
        {"num_beams": None, "max_time": None, "temperature": 1.0},
        {"decoder_start_token_id": 0, "eos_token_id": [END]},  # the same tokens as those of the configuration
    ],
    ids=str,
)
def test_setting_without_an_effect_is_accepted(settings: dict[str, Any]) -> None:
    model: Any = tiny_nat()
    source = random_tokens(2, 5)
    assert torch.equal(model.generate(source, **settings), model.generate(source))


def test_outputs_of_forward_in_the_configuration_do_not_stop_generate() -> None:
    model, plain = FAMILY["nat"](output_hidden_states=True, output_attentions=True), FAMILY["nat"]()
    source = random_tokens(2, 5)
    generated = model.generate(source, return_dict_in_generate=False)
    assert torch.equal(generated, plain.generate(source))


def test_saved_beams_are_an_error_that_names_the_generation_config() -> None:
    model: Any = tiny_nat()
    source = random_tokens(2, 5)
    expected = model.generate(source)
    model.generation_config = GenerationConfig(num_beams=4)
    with pytest.raises(ValueError, match=r"^num_beams: .* generation config\.$"):
        model.generate(source)
    assert torch.equal(model.generate(source, num_beams=None), expected)
