"""The SGLang plugin. `register` is the entry point; only `sglang_*` packages know an SGLang version from inside."""
