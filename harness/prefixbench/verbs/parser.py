"""The argument parser of every verb: a mistake on the command line is one line, like every other error."""

from __future__ import annotations

import argparse
from typing import NoReturn

from prefixbench.errors import UsageError


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")
