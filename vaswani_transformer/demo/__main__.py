"""Run `vaswani-demo` as `python -m vaswani_transformer.demo`."""

from .command import main

if __name__ == "__main__":
    main()
