"""Measures: what is done with a running server, and what is kept of it."""
