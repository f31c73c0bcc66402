"""Sentence pairs for training: read at once or as a stream, checked, and tokenized."""
