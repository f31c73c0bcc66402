"""Run `vaswani-convert` as `python -m vaswani_transformer.convert`."""

from .command import main

if __name__ == "__main__":
    main()
