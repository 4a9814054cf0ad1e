"""Verbs of the command line, one module each: arguments in, text and an exit code out."""
