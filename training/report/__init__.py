"""What a run reports: `results.json`, and the model card made from it."""
