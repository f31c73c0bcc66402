"""What a run does while it trains: speed, padding, floating-point operations, and where the time goes."""
