"""Shared code of the commands: errors, files, arguments, modes and checked loading."""
