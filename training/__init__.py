"""Training from recipes, evaluation and publishing, run from a clone of the repository."""
