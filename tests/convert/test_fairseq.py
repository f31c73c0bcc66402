"""Models and vocabularies of fairseq: imported, they compute what plain torch does; others end in one line."""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM

from tests.convert.originals import END, FF, HEADS, LAYERS, PAD, D, V, assert_alike, randomize_weights
from tests.helpers import load_tokenizer, user_error
from vaswani_transformer.convert.command import main
from vaswani_transformer.convert.fairseq import from_fairseq
from vaswani_transformer.convert.fairseq_tokenizer import fairseq_tokenizer
from vaswani_transformer.tokenizer import text_encoder


def positions_of_fairseq(count: int) -> Tensor:
    """Return the table by its formula: position p has the number p + 2, and frequency i is 10000^(-i / (d / 2 - 1))."""
    rows = []
    for position in range(count):
        angles = [(position + PAD + 1) * math.exp(-i * math.log(10000) / (D // 2 - 1)) for i in range(D // 2)]
        rows.append([*map(math.sin, angles), *map(math.cos, angles)])
    return torch.tensor(rows)


class FairseqLayer(nn.Module):
    """A post-norm layer of plain torch modules with fairseq's weight names."""

    def __init__(self, has_memory: bool) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(D, HEADS, batch_first=True)
        self.self_attn_layer_norm = nn.LayerNorm(D)
        if has_memory:
            self.encoder_attn = nn.MultiheadAttention(D, HEADS, batch_first=True)
            self.encoder_attn_layer_norm = nn.LayerNorm(D)
        self.fc1, self.fc2 = nn.Linear(D, FF), nn.Linear(FF, D)
        self.final_layer_norm = nn.LayerNorm(D)

    def forward(
        self, x: Tensor, is_padding: Tensor, mask: Tensor | None = None, memory: Tensor | None = None
    ) -> Tensor:
        key_padding = is_padding if memory is None else None
        x = self.self_attn_layer_norm(x + self.self_attn(x, x, x, key_padding_mask=key_padding, attn_mask=mask)[0])
        if memory is not None:
            seen = self.encoder_attn(x, memory, memory, key_padding_mask=is_padding)[0]
            x = self.encoder_attn_layer_norm(x + seen)
        return self.final_layer_norm(x + self.fc2(self.fc1(x).relu()))


class FairseqTransformer(nn.Module):
    """The oracle: fairseq's transformer_wmt_en_de with torch's own attention."""

    encoder: Any
    decoder: Any

    def __init__(self, scale: bool = True) -> None:
        super().__init__()
        for name in ("encoder", "decoder"):
            stack = nn.Module()
            stack.embed_tokens = nn.Embedding(V, D)
            stack.layers = nn.ModuleList(FairseqLayer(name == "decoder") for _ in range(LAYERS))
            setattr(self, name, stack)
        randomize_weights(self)
        self.decoder.embed_tokens.weight = self.encoder.embed_tokens.weight
        self.scale = D**0.5 if scale else 1.0
        self.positions = [positions_of_fairseq(64)] * 2

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor, **ignored: Any) -> argparse.Namespace:
        is_padding, length = input_ids.eq(PAD), decoder_input_ids.shape[1]
        x = self.encoder.embed_tokens(input_ids) * self.scale + self.positions[0][: input_ids.shape[1]]
        for layer in self.encoder.layers:
            x = layer(x, is_padding)
        y = self.decoder.embed_tokens(decoder_input_ids) * self.scale + self.positions[1][:length]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        for layer in self.decoder.layers:
            y = layer(y, is_padding, mask, memory=x)
        return argparse.Namespace(logits=y @ self.decoder.embed_tokens.weight.T)


def split(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state by the names of newer versions, with separate queries, keys and values."""
    split_state = {}
    for key, value in state.items():
        if "in_proj" in key:
            split_state |= {
                key.replace("in_proj_", f"{n}_proj."): v for n, v in zip("qkv", value.chunk(3), strict=True)
            }
        else:
            split_state[key] = value
    return split_state


ARGUMENTS: dict[str, Any] = {
    "arch": "transformer_wmt_en_de", "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS,
    "max_source_positions": 64, "max_target_positions": 48, "encoder_normalize_before": False,
    "share_all_embeddings": True, "activation_fn": "relu", "dropout": 0.3,
}  # fmt: skip


SIDES = ("encoder", "decoder")


def save_checkpoint(path: Path, state: dict[str, Tensor], newer: bool = True, **arguments: Any) -> Path:
    arguments = {**ARGUMENTS, **arguments}
    extra = {"encoder.version": torch.tensor([3.0]), "decoder.version": torch.tensor([3.0])}
    for stack in SIDES:
        extra[f"{stack}.embed_positions._float_tensor"] = torch.zeros(1)
    if newer:
        state = split(state) | {"decoder.output_projection.weight": state["decoder.embed_tokens.weight"]}
        settings = {"args": None, "cfg": {"model": argparse.Namespace(**arguments)}}
    else:
        settings = {"args": argparse.Namespace(**arguments)}
    torch.save(settings | {"model": state | extra, "last_optimizer_state": None}, path)
    return path


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("newer", [True, False])
def test_fairseq_checkpoint_computes_what_plain_torch_does(newer: bool, scale: bool, tmp_path: Path) -> None:
    original = FairseqTransformer(scale)
    path = save_checkpoint(tmp_path / "c.pt", original.state_dict(), newer, no_scale_embedding=not scale)
    imported = from_fairseq(path)
    assert_alike(imported.model, original, PAD)
    assert imported.difference is not None
    assert imported.difference < 1e-4  # from Transformers' FSMT
    config = imported.model.config
    assert (config.target_start_token_id, config.max_position_embeddings, config.dropout) == (END, 64, 0.3)


def test_relu_dropout_is_the_activation_dropout_where_that_is_zero(tmp_path: Path) -> None:
    """As in fairseq, whose newer configurations always have both."""
    state = FairseqTransformer().state_dict()
    for activation, relu, expected in ((0.0, 0.2, 0.2), (0.1, 0.0, 0.1), (0.1, 0.2, 0.1)):
        path = save_checkpoint(tmp_path / "c.pt", state, activation_dropout=activation, relu_dropout=relu)
        assert from_fairseq(path).model.config.activation_dropout == expected


def test_fairseq_learned_positions_begin_after_the_padding_id(tmp_path: Path) -> None:
    original = FairseqTransformer()
    tables = {f"{stack}.embed_positions.weight": torch.randn(30 + PAD + 1, D) for stack in ("encoder", "decoder")}
    original.positions = [table[PAD + 1 :] for table in tables.values()]
    imported = from_fairseq(save_checkpoint(tmp_path / "c.pt", original.state_dict() | tables))
    assert_alike(imported.model, original, PAD)
    assert imported.difference is None
    tables["decoder.embed_positions.weight"] = torch.randn(9, D)
    with pytest.raises(ValueError, match=r"has positions for \[7, 30\] tokens of source and target; here both"):
        from_fairseq(save_checkpoint(tmp_path / "c.pt", original.state_dict() | tables))


class Malicious:
    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return (exec, ("raise SystemExit('code was run')",))


@pytest.mark.parametrize("location", ["args", "model", "last_optimizer_state"])
def test_checkpoint_cannot_run_code(location: str, tmp_path: Path) -> None:
    content = {"model": {}, "args": argparse.Namespace()}
    torch.save(content | {location: {"weight": argparse.Namespace(inner=Malicious())}}, tmp_path / "c.pt")
    with pytest.raises(ValueError, match=r"contains \S*exec, which could run code"):
        from_fairseq(tmp_path / "c.pt")


@pytest.mark.parametrize("content", [b"", b"text", b"PK"])
def test_file_that_is_no_checkpoint_is_an_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "c.pt").write_bytes(content)
    with pytest.raises(ValueError, match="not a checkpoint that torch can read"):
        from_fairseq(tmp_path / "c.pt")


def test_missing_checkpoint_is_an_error_that_asks_for_the_file(tmp_path: Path) -> None:
    with user_error(r"none\.pt: there is no such file; give the \.pt file that fairseq saved\.$"):
        from_fairseq(tmp_path / "none.pt")


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({}, {"encoder_normalize_before": True}, "encoder_normalize_before is True, pre-norm"),
        ({}, {"adaptive_softmax_cutoff": "1,2"}, "adaptive_softmax_cutoff is '1,2', an adaptive softmax"),
        ({"decoder.layer_norm.weight": torch.ones(D)}, {}, r"has a weight decoder.layer_norm.weight, which"),
        ({"decoder.embed_tokens.weight": torch.ones(V, D)}, {}, "has separate embeddings of source and target"),
        ({}, {"activation_fn": "relu_squared_or_so"}, "'relu_squared_or_so' is not a known activation function"),
        ({}, {"decoder_attention_heads": 2}, r"decoder_attention_heads \(2\) differ"),
        (
            {"decoder.layers.0.fc2.bias": torch.ones(30)},
            {},
            r"feed_forward.fc2.bias .* got shape \(30,\), expected \(16,",
        ),
        ({"encoder.layers.0.fc1.weight": 3}, {}, "encoder.layers.0.fc1.weight is of type int, not a weight; save the"),
        ({}, {f"{side}_attention_heads": 3 for side in SIDES}, r"settings are invalid: .*\(16\) .* by num_heads \(3\)"),
        ({"encoder.layers.1000000000.fc1.weight": torch.ones(1)}, {}, r"has a layer encoder\.layers\.1000000000 "),
        ({"encoder.layers.x.fc1.weight": torch.ones(1)}, {}, r"has a layer encoder\.layers\.x and not all before it"),
        ({"decoder.embed_tokens.weight": torch.ones(3)}, {}, r"cannot be loaded: "),
        ({"encoder.layers.0.fc1.weight": torch.eye(3).to_sparse()}, {}, r"is of type Tensor, not a weight"),
        ({}, {"max_source_positions": 10**12}, r"max_source_positions is 1000000000000, expected a whole"),
        ({}, {"max_target_positions": [1]}, r"max_target_positions is \[1\], expected a whole number"),
        ({}, {f"{side}_attention_heads": {} for side in SIDES}, r"(settings are invalid|cannot be loaded)"),
        (
            {f"encoder.layers.{layer}.self_attn.in_proj_bias": None for layer in range(LAYERS)},
            {},
            r"has model\.\S+bias, which a model with its other weights does not have",
        ),
    ],
)
def test_fairseq_weight_or_setting_that_the_paper_lacks_is_an_error_that_names_it(
    change: dict[str, Any], arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    state = FairseqTransformer().state_dict() | change
    path = save_checkpoint(
        tmp_path / "c.pt", {key: value for key, value in state.items() if value is not None}, **arguments
    )
    with user_error(message):
        from_fairseq(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "settings.json: not valid JSON"),
        (b"\xff", "settings.json: not valid JSON"),
        (b"[1]", "settings.json: got a list, expected an object such as"),
    ],
)
def test_checkpoint_without_settings_is_an_error(content: bytes, message: str, tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "c.pt", FairseqTransformer().state_dict())
    (tmp_path / "settings.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        from_fairseq(path, config=tmp_path / "settings.json")


def test_checkpoint_without_its_settings_takes_them_from_a_file(tmp_path: Path) -> None:
    original = FairseqTransformer()
    torch.save({"model": original.state_dict()}, tmp_path / "c.pt")
    with pytest.raises(ValueError, match="has no number of heads; give a JSON file"):
        from_fairseq(tmp_path / "c.pt")
    (tmp_path / "settings.json").write_text(json.dumps(ARGUMENTS))
    assert_alike(from_fairseq(tmp_path / "c.pt", config=tmp_path / "settings.json").model, original, PAD)
    torch.save({"weights": {}}, tmp_path / "c.pt")
    with pytest.raises(ValueError, match='has no "model", so it is not a fairseq checkpoint'):
        from_fairseq(tmp_path / "c.pt")
    torch.save({"model": {"w": torch.ones(1)}, "args": argparse.Namespace(**ARGUMENTS)}, tmp_path / "c.pt")
    with pytest.raises(ValueError, match="has no encoder and decoder of fairseq's Transformer"):
        from_fairseq(tmp_path / "c.pt")


WORDS = [
    *("l@@", "o@@", "w@@", "e@@", "r@@", "s@@", "t", "r", "w", "lo@@", "low", "low@@", "es@@", "est", "er"),
    "madeupword0000",
]
CODES = "#version: 0.2\nl o\nlo w\nlo w</w>\ne s\nes t</w>\ne r</w>\n"


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    (tmp_path / "dict.txt").write_text("".join(f"{word} 7\n" for word in WORDS))
    (tmp_path / "codes").write_text(CODES)
    return tmp_path


def test_fairseq_vocabulary_and_merges_become_a_tokenizer(vocabulary: Path) -> None:
    """The rules of subword-nmt by hand: merges in their order, "</w>" at the end of a word, "@@" before it."""
    tokenizer = fairseq_tokenizer(vocabulary / "dict.txt", vocabulary / "codes")
    ids = {word: index for index, word in enumerate(["<s>", "<pad>", "</s>", "<unk>", *WORDS])}
    expected = {
        "low": ["low"],
        "lowest": ["low@@", "est"],
        "low lower est": ["low", "low@@", "er", "est"],
        "lot ow": ["lo@@", "t", "o@@", "w"],
        "loz <s>": ["lo@@", "<unk>", "<unk>", "s@@", "<unk>"],
    }
    for text, pieces in expected.items():
        assert text_encoder(tokenizer)(text)["input_ids"] == [ids[piece] for piece in [*pieces, "</s>"]]
        if "<unk>" not in pieces:
            assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    split_by_hand = fairseq_tokenizer(vocabulary / "dict.txt", None)
    for pieces in [["low@@", "est", "low"], ["lo@@", "t", "r"]]:
        token_ids = split_by_hand(" ".join(pieces))["input_ids"]
        assert token_ids == [ids[piece] for piece in [*pieces, "</s>"]]
        text = " ".join(pieces).replace("@@ ", "")
        assert split_by_hand.decode(token_ids, skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("codes", CODES + "q w\n", "1 of 7 merges have pieces that the vocabulary lacks, the first 'q w'; a"),
        ("codes", "l o\nw </w>\n", "line 2: not a merge of subword-nmt 0.2 or fastBPE"),
        ("dict.txt", "a 1\nb\n", "line 2: not a token and its count; give fairseq's dict.txt"),
        ("dict.txt", "\udcff 1\n", r"dict.txt: not UTF-8 \(.*byte 0xff in position 0.*\); give the file that fairseq"),
        ("codes", "l \udcff\n", "codes: not UTF-8"),
    ],
)
def test_malformed_vocabulary_or_merges_are_an_error(name: str, content: str, message: str, vocabulary: Path) -> None:
    (vocabulary / name).write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ValueError, match=message):
        fairseq_tokenizer(vocabulary / "dict.txt", vocabulary / "codes")


def test_command_imports_a_fairseq_checkpoint(vocabulary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = save_checkpoint(vocabulary / "c.pt", FairseqTransformer().state_dict()), vocabulary / "out"
    call = ["fairseq", str(path), str(out), f"--dict={vocabulary / 'dict.txt'}", f"--codes={vocabulary / 'codes'}"]
    with pytest.raises(SystemExit):
        main(call)
    assert "has 20 entries with the special ones, and the model 40; give the model's own" in capsys.readouterr().err
    assert not out.exists()
    with (vocabulary / "dict.txt").open("a") as file:
        file.writelines(f"madeupword{number:04} 0\n" for number in range(1, 21))
    main(call)
    assert "Largest difference on random sentences: " in capsys.readouterr().out
    tokenizer, model = load_tokenizer(out), AutoModelForSeq2SeqLM.from_pretrained(out)
    generated = model.generate(**tokenizer(["low lowest"], return_tensors="pt"), max_new_tokens=4)
    assert generated[0, 0] == END
    assert {file.suffix for file in out.iterdir()} == {".json", ".safetensors"}
