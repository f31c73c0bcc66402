"""A recipe: its fields with their limits, how it is read and explained, and the families of models."""
