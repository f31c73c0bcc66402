"""`python -m vaswani_transformer.demo` is the command `vaswani-demo`."""

from .command import main

if __name__ == "__main__":
    main()
