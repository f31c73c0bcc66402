"""Imported models of other tools compute the same, and a setting without a counterpart is an error that names it."""

import argparse
import json
import math
import shutil

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    FSMTConfig,
    FSMTForConditionalGeneration,
    FSMTTokenizer,
    MarianConfig,
    MarianMTModel,
    MarianTokenizer,
)

from tests.helpers import FLOAT32
from vaswani_transformer.convert.command import main
from vaswani_transformer.convert.fairseq import from_fairseq
from vaswani_transformer.convert.fairseq_tokenizer import fairseq_tokenizer
from vaswani_transformer.convert.transformers_models import from_fsmt, from_marian
from vaswani_transformer.tokenizer import text_encoder
from vaswani_transformer.translate.ctranslate2_engine import CTranslate2Engine

V, D, HEADS, FF, LAYERS, PAD, END = 40, 16, 4, 24, 2, 1, 2
SHAPE = {
    "d_model": D, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": FF, "decoder_ffn_dim": FF, "max_position_embeddings": 32,
}  # fmt: skip


def randomize_weights(model):
    """Set random weights, none of them 0 or 1, norms and biases too; the tables of positions stay."""
    for name, weight in model.named_parameters():
        if "embed_positions" not in name:
            weight.data = 0.3 * torch.randn_like(weight) + name.endswith("norm.weight")
    return model.eval()


def marian(**overrides):
    ids = {"pad_token_id": V - 1, "decoder_start_token_id": V - 1, "eos_token_id": 0, "forced_eos_token_id": 0}
    model = randomize_weights(MarianMTModel(MarianConfig(**{"vocab_size": V, **SHAPE, **ids, **overrides})))
    model.generation_config.bad_words_ids = [[V - 1]]
    return model


def fsmt(**overrides):
    sizes = {"langs": ["en", "de"], "src_vocab_size": V, "tgt_vocab_size": V, "tie_word_embeddings": True}
    return randomize_weights(FSMTForConditionalGeneration(FSMTConfig(**{**SHAPE, **sizes, **overrides})))


def logits_of(model, input_ids, decoder_input_ids, pad):
    mask = input_ids.ne(pad).long()
    with torch.no_grad():
        return model(
            input_ids=input_ids, attention_mask=mask, decoder_input_ids=decoder_input_ids, use_cache=False
        ).logits


def assert_alike(ours, theirs, pad):
    sources, targets = torch.randint(4, V - 1, (3, 9)), torch.randint(4, V - 1, (3, 7))
    sources[1, 6:] = sources[2, 2:] = pad
    actual = logits_of(ours, sources, targets, pad)
    torch.testing.assert_close(actual, logits_of(theirs, sources, targets, pad), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("activation", ["swish", "relu", "gelu"])
def test_marian_model_computes_the_same(activation, scale, tmp_path):
    original = marian(activation_function=activation, scale_embedding=scale)
    original.save_pretrained(tmp_path)
    imported = from_marian(str(tmp_path), with_tokenizer=False)
    assert imported.difference < 1e-4
    assert_alike(imported.model, original, PAD)
    assert imported.model.config.tie_word_embeddings
    assert imported.model.config.activation_function == activation.replace("swish", "silu")
    beams = {"num_beams": 3, "max_new_tokens": 8}
    sources = torch.randint(4, V - 1, (2, 6))
    assert torch.equal(imported.model.generate(sources, **beams), original.generate(sources, **beams))


def test_marian_positions_are_halves_of_the_papers_frequencies(tmp_path):
    marian().save_pretrained(tmp_path)
    table = from_marian(str(tmp_path), with_tokenizer=False).model.model.decoder.input_embedding.positions.table.weight
    for position in (0, 1, 31):
        angles = [position / 10000 ** (2 * pair / D) for pair in range(D // 2)]
        expected = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)])
        torch.testing.assert_close(table[position], expected, **FLOAT32)


@pytest.mark.parametrize("seed", range(3))
def test_marian_bias_of_the_logits_is_folded_into_the_projection(seed, tmp_path):
    """The logits are equal, not only the probabilities; the last norm's weights are as uneven as trained ones."""
    torch.manual_seed(seed)
    original = marian()
    original.final_logits_bias.normal_(std=3)
    original.model.decoder.layers[-1].final_layer_norm.weight.data.uniform_(0.05, 2).mul_(1 - 2 * (seed == 2))
    original.save_pretrained(tmp_path)
    imported = from_marian(str(tmp_path), with_tokenizer=False)
    assert not imported.model.config.tie_word_embeddings
    assert imported.difference < 1e-4
    assert_alike(imported.model, original, PAD)
    imported.model.save_pretrained(tmp_path / "ours")
    assert_alike(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours"), original, PAD)


def test_bias_that_rounding_would_lose_is_an_error(tmp_path):
    original = marian()
    original.final_logits_bias.normal_()
    original.model.decoder.layers[-1].final_layer_norm.weight.data[3] = 0
    original.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"final_logits_bias cannot be represented: .* gains close to 0"):
        from_marian(str(tmp_path), with_tokenizer=False)


@pytest.mark.parametrize("scale", [True, False])
def test_fsmt_model_computes_the_same(scale, tmp_path):
    original = fsmt(scale_embedding=scale)
    original.save_pretrained(tmp_path)
    imported = from_fsmt(str(tmp_path), with_tokenizer=False)
    assert imported.difference < 1e-4
    assert_alike(imported.model, original, PAD)
    assert imported.model.config.target_start_token_id == END


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: marian(normalize_before=True),
            "normalize_before is True, pre-norm, which the paper's model does not",
        ),
        (lambda: marian(normalize_embedding=True), "normalize_embedding is True, a norm of the embeddings"),
        (lambda: marian(decoder_attention_heads=2), r"_attention_heads \(4\) and decoder_attention_heads \(2\) differ"),
        (lambda: marian(decoder_ffn_dim=12), r"encoder_ffn_dim \(24\) and decoder_ffn_dim \(12\) differ"),
        (
            lambda: marian(share_encoder_decoder_embeddings=False, tie_word_embeddings=False),
            "has separate embeddings of source and target; here they share one matrix",
        ),
        (lambda: fsmt(tie_word_embeddings=False, src_vocab_size=V + 1), "has separate embeddings of source and target"),
    ],
)
def test_setting_without_a_counterpart_is_an_error_that_names_it(make, message, tmp_path):
    original = make()
    original.save_pretrained(tmp_path)
    read = from_marian if isinstance(original, MarianMTModel) else from_fsmt
    with pytest.raises(ValueError, match=message):
        read(str(tmp_path), with_tokenizer=False)


def positions_of_fairseq(count):
    """Return the table by its formula: position p has the number p + 2, and frequency i is 10000^(-i / (d / 2 - 1))."""
    rows = []
    for position in range(count):
        angles = [(position + PAD + 1) * math.exp(-i * math.log(10000) / (D // 2 - 1)) for i in range(D // 2)]
        rows.append([*map(math.sin, angles), *map(math.cos, angles)])
    return torch.tensor(rows)


class FairseqLayer(nn.Module):
    """A post-norm layer of plain torch modules with fairseq's weight names."""

    def __init__(self, has_memory):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(D, HEADS, batch_first=True)
        self.self_attn_layer_norm = nn.LayerNorm(D)
        if has_memory:
            self.encoder_attn = nn.MultiheadAttention(D, HEADS, batch_first=True)
            self.encoder_attn_layer_norm = nn.LayerNorm(D)
        self.fc1, self.fc2 = nn.Linear(D, FF), nn.Linear(FF, D)
        self.final_layer_norm = nn.LayerNorm(D)

    def forward(self, x, is_padding, mask=None, memory=None):
        key_padding = is_padding if memory is None else None
        x = self.self_attn_layer_norm(x + self.self_attn(x, x, x, key_padding_mask=key_padding, attn_mask=mask)[0])
        if memory is not None:
            seen = self.encoder_attn(x, memory, memory, key_padding_mask=is_padding)[0]
            x = self.encoder_attn_layer_norm(x + seen)
        return self.final_layer_norm(x + self.fc2(self.fc1(x).relu()))


class FairseqTransformer(nn.Module):
    """The oracle: fairseq's transformer_wmt_en_de with torch's own attention."""

    def __init__(self, scale=True):
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

    def forward(self, input_ids, decoder_input_ids, **ignored):
        is_padding, length = input_ids.eq(PAD), decoder_input_ids.shape[1]
        x = self.encoder.embed_tokens(input_ids) * self.scale + self.positions[0][: input_ids.shape[1]]
        for layer in self.encoder.layers:
            x = layer(x, is_padding)
        y = self.decoder.embed_tokens(decoder_input_ids) * self.scale + self.positions[1][:length]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        for layer in self.decoder.layers:
            y = layer(y, is_padding, mask, memory=x)
        return argparse.Namespace(logits=y @ self.decoder.embed_tokens.weight.T)


def split(state):
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


ARGUMENTS = {
    "arch": "transformer_wmt_en_de", "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS,
    "max_source_positions": 64, "max_target_positions": 48, "encoder_normalize_before": False,
    "share_all_embeddings": True, "activation_fn": "relu", "dropout": 0.3,
}  # fmt: skip


def save_checkpoint(path, state, newer=True, **arguments):
    arguments = {**ARGUMENTS, **arguments}
    extra = {"encoder.version": torch.tensor([3.0]), "decoder.version": torch.tensor([3.0])}
    for stack in ("encoder", "decoder"):
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
def test_fairseq_checkpoint_computes_what_plain_torch_does(newer, scale, tmp_path):
    original = FairseqTransformer(scale)
    path = save_checkpoint(tmp_path / "c.pt", original.state_dict(), newer, no_scale_embedding=not scale)
    imported = from_fairseq(path)
    assert_alike(imported.model, original, PAD)
    assert imported.difference < 1e-4  # from Transformers' FSMT
    config = imported.model.config
    assert (config.target_start_token_id, config.max_position_embeddings, config.dropout) == (END, 64, 0.3)


def test_fairseq_learned_positions_begin_after_the_padding_id(tmp_path):
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
    def __reduce__(self):
        return (exec, ("raise SystemExit('code was run')",))


@pytest.mark.parametrize("location", ["args", "model", "last_optimizer_state"])
def test_checkpoint_cannot_run_code(location, tmp_path):
    content = {"model": {}, "args": argparse.Namespace()}
    torch.save(content | {location: {"weight": argparse.Namespace(inner=Malicious())}}, tmp_path / "c.pt")
    with pytest.raises(ValueError, match=r"contains \S*exec, which could run code"):
        from_fairseq(tmp_path / "c.pt")


@pytest.mark.parametrize("content", [b"", b"text", b"PK"])
def test_file_that_is_no_checkpoint_is_an_error(content, tmp_path):
    (tmp_path / "c.pt").write_bytes(content)
    with pytest.raises(ValueError, match="not a checkpoint that torch can read"):
        from_fairseq(tmp_path / "c.pt")


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
            r"decoder.layers.0.feed_forward.fc2.bias does not fit .*; got shape \(30,\), expected \(16,\)\. Here",
        ),
        ({"encoder.layers.0.fc1.weight": 3}, {}, "encoder.layers.0.fc1.weight is of type int, not a weight; save the"),
        (
            {},
            {"encoder_attention_heads": 3, "decoder_attention_heads": 3},
            r"its settings are invalid: .*d_model \(16\) must be divisible by num_heads \(3\)",
        ),
    ],
)
def test_fairseq_setting_that_the_paper_lacks_is_an_error_that_names_it(change, arguments, message, tmp_path):
    path = save_checkpoint(tmp_path / "c.pt", FairseqTransformer().state_dict() | change, **arguments)
    with pytest.raises(ValueError, match=message):
        from_fairseq(path)


def test_checkpoint_with_biases_in_only_one_stack_is_an_error(tmp_path):
    state = FairseqTransformer().state_dict()
    state = {key: value for key, value in state.items() if not (key.startswith("encoder") and "in_proj_bias" in key)}
    with pytest.raises(ValueError, match=r"has model\.\S+bias, which a model with its other weights does not have"):
        from_fairseq(save_checkpoint(tmp_path / "c.pt", state))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "settings.json: not valid JSON"),
        (b"\xff", "settings.json: not valid JSON"),
        (b"[1]", "settings.json: got a list, expected an object such as"),
    ],
)
def test_checkpoint_without_settings_is_an_error(content, message, tmp_path):
    path = save_checkpoint(tmp_path / "c.pt", FairseqTransformer().state_dict())
    (tmp_path / "settings.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        from_fairseq(path, config=tmp_path / "settings.json")


def test_checkpoint_without_its_settings_takes_them_from_a_file(tmp_path):
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
    "l@@",
    "o@@",
    "w@@",
    "e@@",
    "r@@",
    "s@@",
    "t",
    "r",
    "w",
    "lo@@",
    "low",
    "low@@",
    "es@@",
    "est",
    "er",
    "madeupword0000",
]
CODES = "#version: 0.2\nl o\nlo w\nlo w</w>\ne s\nes t</w>\ne r</w>\n"


@pytest.fixture
def vocabulary(tmp_path):
    (tmp_path / "dict.txt").write_text("".join(f"{word} 7\n" for word in WORDS))
    (tmp_path / "codes").write_text(CODES)
    return tmp_path


def test_fairseq_vocabulary_and_merges_become_a_tokenizer(vocabulary):
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
        (
            "codes",
            CODES + "q w\n",
            "1 of 7 merges have pieces that the vocabulary lacks, the first 'q w'; a",
        ),
        ("codes", "l o\nw </w>\n", "line 2: not a merge of subword-nmt 0.2 or fastBPE"),
        ("dict.txt", "a 1\nb\n", "line 2: not a token and its count; give fairseq's dict.txt"),
        ("dict.txt", "\udcff 1\n", r"dict.txt: not UTF-8 \(.*byte 0xff in position 0.*\); give the file that fairseq"),
        ("codes", "l \udcff\n", "codes: not UTF-8"),
    ],
)
def test_malformed_vocabulary_or_merges_are_an_error(name, content, message, vocabulary):
    (vocabulary / name).write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ValueError, match=message):
        fairseq_tokenizer(vocabulary / "dict.txt", vocabulary / "codes")


def test_command_imports_a_fairseq_checkpoint(vocabulary, capsys):
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
    tokenizer, model = AutoTokenizer.from_pretrained(out), AutoModelForSeq2SeqLM.from_pretrained(out)
    generated = model.generate(**tokenizer(["low lowest"], return_tensors="pt"), max_new_tokens=4)
    assert generated[0, 0] == END
    assert {file.suffix for file in out.iterdir()} == {".json", ".safetensors"}


@pytest.fixture(scope="module")
def marian_folder(tmp_path_factory):
    """Save a Marian model with its usual tokenizer: two sentencepiece models and a vocabulary."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("models") / "marian"
    folder.mkdir()
    texts = ["the cat is black", "good morning", "el gato es negro", "buenos dias"] * 20
    for name in ("source", "target"):
        with (folder / f"{name}.spm").open("wb") as file:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(texts), model_writer=file, vocab_size=40, hard_vocab_limit=False, minloglevel=2
            )
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "source.spm"))
    strings = [pieces.id_to_piece(index) for index in range(len(pieces))]
    order = ["</s>", "<unk>", *(piece for piece in strings if piece not in ("<s>", "</s>", "<unk>")), "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({piece: index for index, piece in enumerate(order)}))
    MarianTokenizer(str(folder / "source.spm"), str(folder / "target.spm"), str(folder / "vocab.json")).save_pretrained(
        folder
    )
    model = marian(vocab_size=len(order), pad_token_id=len(order) - 1, decoder_start_token_id=len(order) - 1)
    model.generation_config.bad_words_ids = [[len(order) - 1]]
    model.save_pretrained(folder)
    return folder


def test_command_imports_a_marian_model_with_its_tokenizer(marian_folder, tmp_path, capsys):
    out = tmp_path / "out"
    main(["marian", str(marian_folder), str(out)])
    assert "with a MarianTokenizer\nLargest difference on random sentences: " in capsys.readouterr().out
    tokenizer, reference = AutoTokenizer.from_pretrained(out), MarianTokenizer.from_pretrained(marian_folder)
    texts = ["the cat is good", "el morning"]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    assert torch.equal(batch["input_ids"], reference(texts, padding=True, return_tensors="pt")["input_ids"])
    model, original = AutoModelForSeq2SeqLM.from_pretrained(out), MarianMTModel.from_pretrained(marian_folder)
    generated = model.generate(**batch, num_beams=2, max_new_tokens=6)
    expected = original.generate(**batch, num_beams=2, max_new_tokens=6)
    assert tokenizer.batch_decode(generated) == reference.batch_decode(expected)
    main(["marian", str(marian_folder), str(tmp_path / "bare"), "--without_tokenizer"])
    assert "without a tokenizer" in capsys.readouterr().out


def test_imported_marian_model_converts_to_ctranslate2(marian_folder, tmp_path, capsys):
    pytest.importorskip("ctranslate2")
    main(["marian", str(marian_folder), str(tmp_path / "ours")])
    main(["ctranslate2", str(tmp_path / "ours"), str(tmp_path / "engine")])
    model, tokenizer = (
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours"),
        AutoTokenizer.from_pretrained(tmp_path / "ours"),
    )
    texts = ["the cat is good", "el morning"]
    generated = model.generate(
        **tokenizer(texts, padding=True, return_tensors="pt"), max_new_tokens=9, forced_eos_token_id=None
    )
    search = CTranslate2Engine(tmp_path / "engine", max_new_tokens=9, threads=1)
    assert search.translate(texts) == tokenizer.batch_decode(generated, skip_special_tokens=True)


def test_tokenizer_of_a_fsmt_model_is_imported_too(tmp_path, capsys):
    pytest.importorskip("sacremoses")
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "a", "b</w>", "a</w>", "ab</w>"]
    for name in ("vocab-src.json", "vocab-tgt.json"):
        (tmp_path / name).write_text(json.dumps({piece: index for index, piece in enumerate(pieces)}))
    (tmp_path / "merges.txt").write_text("a b</w> 3\n")
    files = [str(tmp_path / name) for name in ("vocab-src.json", "vocab-tgt.json", "merges.txt")]
    FSMTTokenizer(["en", "de"], *files).save_pretrained(tmp_path / "fsmt")
    fsmt(src_vocab_size=8, tgt_vocab_size=8).save_pretrained(tmp_path / "fsmt")
    main(["fsmt", str(tmp_path / "fsmt"), str(tmp_path / "out")])
    assert "with a FSMTTokenizer" in capsys.readouterr().out
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("ab a").input_ids == [7, 6, 2]


def test_command_ends_with_one_line_for_a_model_of_another_type(marian_folder, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["fsmt", str(marian_folder), str(tmp_path / "out")])
    assert "is a model of another type; got 'marian', expected 'fsmt'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["fairseq", str(tmp_path / "c.pt"), str(tmp_path / "out"), "--codes=x"])
    assert "a tokenizer needs the vocabulary too; give --dict as well" in capsys.readouterr().err
    broken = shutil.copytree(marian_folder, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"x")
    with pytest.raises(SystemExit):
        main(["marian", str(broken), str(tmp_path / "out")])
    assert capsys.readouterr().err.startswith(f"{broken}: cannot be loaded: ")
    shutil.rmtree(broken)
    assert list(tmp_path.iterdir()) == []
