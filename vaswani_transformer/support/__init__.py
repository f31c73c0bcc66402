"""Shared code of the commands: errors and arguments, files, and models."""
