"""Sentence pairs for training: read into memory or as a stream, checked, and tokenized."""
