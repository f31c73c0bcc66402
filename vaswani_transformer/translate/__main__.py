"""Run `vaswani-translate` as `python -m vaswani_transformer.translate`."""

from .command import main

if __name__ == "__main__":
    main()
