"""Errors, files, command lines, modes and checked loading, which every command uses."""
