"""Run `vaswani-translate` as `python -m vaswani_transformer.translation`."""

from .command import main

if __name__ == "__main__":
    main()
