"""Typed configurations, one module per verb that has one, and Hydra's part in reading them. The YAML is in conf/."""

from pathlib import Path


def config_dir() -> Path:
    """The YAML tree: `conf/` of the checkout, or the copy inside an installed wheel (a link makes both one path)."""
    return (Path(__file__).parents[1] / "conf").resolve()
