"""Reproducible benchmarks of shared-prefix decoding: configs -> runs -> records -> reports."""
