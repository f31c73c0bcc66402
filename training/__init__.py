"""Training of the weights: recipes, data, training and scoring, run from a clone."""
