"""Train a recipe on sentence pairs of your own: write the files, write the recipe, train, translate.

python examples/own_data.py [--steps 500] [--folder runs/own-data]
"""

import argparse
import json
from pathlib import Path

import yaml
from accelerate import PartialState
from transformers import AutoModelForSeq2SeqLM

from training import train
from training.machine import uses_cpu
from vaswani_transformer import VaswaniTransformerTokenizer, translate

COLORS = {"red": "rot", "blue": "blau", "green": "gruen", "white": "weiss"}
NOUNS = {"house": "das Haus", "car": "das Auto", "book": "das Buch", "dress": "das Kleid", "ship": "das Schiff"}
PAIRS = [
    (f"the {noun} is {color}.", f"{german_noun} ist {german_color}.")
    for noun, german_noun in NOUNS.items()
    for color, german_color in COLORS.items()
]


def write_data(folder: Path) -> None:
    """Write the three splits as JSON Lines, one pair a line."""
    splits = {"train": PAIRS[:-4], "validation": PAIRS[-4:-2], "test": PAIRS[-2:]}
    for split, pairs in splits.items():
        lines = [json.dumps({"translation": {"en": source, "de": target}}) for source, target in pairs]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_recipe(path: Path, data: Path, steps: int) -> None:
    """Write a recipe for a model that trains in seconds."""
    recipe = {
        "name": "own-data",
        "data": {"kind": "json", "path": str(data)}
        | {name: f"{name}.jsonl" for name in ("train", "validation", "test")},
        "tokenizer": {"vocab_size": 320},
        "model": {"d_model": 64, "d_ff": 128, "num_heads": 4, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0},
        "training": {
            "steps": steps,
            "source_tokens": 256,
            "target_tokens": 256,
            "device_tokens": 256,
            "warmup_steps": 100,
            "learning_rate_scale": 0.4,  # peaks at 0.005
            "evaluation_steps": steps,
        },
    }
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")


def main() -> None:
    """Data, run, translations."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500, help="optimizer steps (500)")
    parser.add_argument("--folder", type=Path, default=Path("runs/own-data"), help="a new folder for data and run")
    options = parser.parse_args()
    folder, launch = options.folder.resolve(), PartialState(cpu=uses_cpu())
    if launch.is_main_process:  # of several processes one writes
        if folder.exists():
            parser.error(f"--folder={options.folder}: exists already; name a new folder.")
        folder.mkdir(parents=True)
        write_data(folder)
        write_recipe(folder / "recipe.yaml", folder, options.steps)
    launch.wait_for_everyone()

    train.main([str(folder / "recipe.yaml"), f"--output_dir={folder / 'run'}"])  # what `python -m training.train` calls
    if not launch.is_main_process:
        return

    tokenizer = VaswaniTransformerTokenizer.from_pretrained(folder / "run")
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / "run")
    sources = [source for source, _ in PAIRS[-2:]]  # the test set
    for translation in translate(model, tokenizer, sources):
        print(translation.text)


if __name__ == "__main__":
    main()
