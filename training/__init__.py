"""How the weights come to be: recipes, data, training and scoring, run from a clone."""
