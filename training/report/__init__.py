"""The report of a run: `results.json`, and the model card made from it."""
