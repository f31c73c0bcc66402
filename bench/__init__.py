"""What measures: speed, memory, and what kills do to a run. Each module is a command with a `--tiny` form."""
