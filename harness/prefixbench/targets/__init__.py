"""Stated targets (conf/targets.yaml) against records."""
