"""What timed kernels say about the dispatcher: its cost model, its threshold, its regret, its own cost."""
