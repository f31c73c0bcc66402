"""Measurements of a run while it trains: speed, padding, floating-point operations, and the time of each phase."""
