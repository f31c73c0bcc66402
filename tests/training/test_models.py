"""A run's model takes the weights of a trained one where they mean the same."""

from typing import Any

import pytest
import torch

from tests.commands import user_error
from tests.models import EVERY_FAMILY, tiny_iterative_vae, tiny_model, tiny_nat
from training.models import copy_weights

FIELD = "training.start_from"


def test_tables_of_tokens_and_positions_keep_their_own_further_rows() -> None:
    table: dict[str, Any] = {"position_embedding": "learned"}
    trained = tiny_model(max_position_embeddings=20, **table)
    model = tiny_model(vocab_size=100, max_position_embeddings=30, **table)
    for weight in model.parameters():
        torch.nn.init.constant_(weight, 7.0)
    copy_weights(model, trained, FIELD)
    for name, weight in model.state_dict().items():
        trained_weight = trained.state_dict()[name]
        rows = len(trained_weight)
        assert torch.equal(weight[:rows], trained_weight)
        assert (weight[rows:] == 7).all()


@pytest.mark.parametrize("family", EVERY_FAMILY)
@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_a_new_vocabulary_are_the_means_of_their_tokens_in_every_family(family: str, tied: bool) -> None:
    """Tokens without any keep their random embeddings, and all weights that belong to no token are copied."""
    trained = EVERY_FAMILY[family](tie_word_embeddings=tied)
    model = EVERY_FAMILY[family](vocab_size=150, tie_word_embeddings=tied)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    entries = {0: [0], 7: [98], 20: [30, 31, 32], 149: [5, 5, 6]}
    copy_weights(model, trained, FIELD, entries=entries)
    tables = 0
    for name, weight in model.state_dict().items():
        trained_weight = trained.state_dict()[name]
        if weight.shape[:1] == (150,):
            tables += 1
            for index, ids in entries.items():
                torch.testing.assert_close(weight[index], trained_weight[ids].mean(0))
            others = [index for index in range(150) if index not in entries]
            assert torch.equal(weight[others], before[name][others])
        else:
            assert torch.equal(weight, trained_weight)
    assert tables >= (1 if tied else 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_length_difference": -5, "max_length_difference": 5}, r"proj\.weight has shape \(41, .*expected \(11, "),
        ({"relative_attention_clip": 2}, r"has shape \(9, .*expected \(5, "),
    ],
)
def test_weights_of_another_meaning_are_an_error(fields: dict[str, int], message: str) -> None:
    with user_error(rf"^training\.start_from: .*{message}.*; write the fields of its config\.json that differ"):
        copy_weights(tiny_nat(**fields), tiny_nat(relative_attention_clip=4), FIELD)


def test_weights_that_the_trained_model_does_not_have_are_an_error() -> None:
    revealed = tiny_iterative_vae(latent="revealed")
    with user_error(r"^training\.start_from: .* does not have the weight .*latent_steps\.0\.empty; write the fields"):
        copy_weights(revealed, tiny_iterative_vae(latent="discrete"), FIELD)
