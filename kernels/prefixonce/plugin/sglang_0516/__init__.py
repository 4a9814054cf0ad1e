"""The adapter for SGLang 0.5.16: the only code that knows its tree, requests, allocators, runner and hooks."""
