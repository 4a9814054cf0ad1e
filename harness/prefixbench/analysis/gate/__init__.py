"""The regression gate, and the proof of its error rates."""
