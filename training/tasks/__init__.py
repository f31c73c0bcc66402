"""The tasks that models train for: their metrics, and what the card says of them."""
