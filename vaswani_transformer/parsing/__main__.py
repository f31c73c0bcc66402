"""Run `vaswani-parse` as `python -m vaswani_transformer.parsing`."""

from .command import main

if __name__ == "__main__":
    main()
