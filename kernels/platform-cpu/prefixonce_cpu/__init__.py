"""CPU reference platform for SGLang: the real scheduler, radix tree and KV pool, with plain torch arithmetic."""
