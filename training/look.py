"""A look at the data of a recipe before training: `python -m training.look RECIPE`.

It prints for each split the number of pairs, their lengths in characters, and how many pairs look wrong: with markup,
HTML entities or placeholders, in capitals only, copied from the source, repeated, or with an odd length ratio. Each
kind has an example. `data.drop` leaves out the training pairs of some kinds. Fields of the recipe are options too.
"""

import logging
import sys

import datasets

from training.data import SPLITS, describe_pairs, read_pairs
from training.recipe import load_recipe
from vaswani_transformer.support.command import CommandParser, UserError, exit_on_user_error


def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser(prog="python -m training.look", description=__doc__, allow_abbrev=False)
    parser.add_argument("recipe", metavar="RECIPE", help="the YAML file that names the data")
    options, overrides = parser.parse_known_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    datasets.disable_progress_bars()
    with exit_on_user_error(OSError):
        recipe = load_recipe(options.recipe, overrides, vars(options))
        if recipe.data.kind == "trees":
            raise UserError(f"data.kind: training.look does not support trees; got the recipe {recipe.name}.")
        for split, rows in read_pairs(recipe, SPLITS).items():
            print(*describe_pairs(str(split), rows), sep="\n")


if __name__ == "__main__":
    main()
