"""Every command on every page: cheap ones are executed, dear ones are composed or parsed as they would be."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hydra import compose, initialize_config_dir

from container.cpu_steps import stage
from prefixbench import cli, store
from prefixbench.config import checks as config_checks
from prefixbench.config import config_dir
from prefixbench.config import kernels as kernels_config
from prefixbench.config.cases import sweep_cases
from prefixbench.config.overrides import prepare
from prefixbench.config.run import register_schema
from prefixbench.verbs import again, fragmentation, watching
from prefixbench.verbs import calibrate as calibrate_cli
from prefixonce.plugin.settings import _READERS as VARIABLES

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "runs/README.md", ROOT / "reports/README.md"])
SHELL = re.compile(r"^```(?:sh|console)\n(.*?)^```", re.M | re.S)
INDENTED = re.compile(r"^    ((?:\w+=\S+ )*(?:prefixbench|make|python3? -m) .*)$", re.M)
SEPARATORS = {";", "&&", "||", "|", "(", ")"}
SHELL_WORDS = {"for", "do", "done", "cd", "export"}


class Command(NamedTuple):
    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def commands(page: Path) -> Iterator[Command]:
    text = page.read_text()
    for block in (*SHELL.findall(text), *INDENTED.findall(text)):
        for line in block.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            words: list[str] = []
            for word in (*lexer, ";"):
                if word not in SEPARATORS:
                    words.append(word)
                elif words:
                    while words and words[0] == "do":
                        words.pop(0)
                    if words and words[0] not in SHELL_WORDS:
                        yield Command(str(page.relative_to(ROOT)), tuple(words))
                    words = []


ALL = list(dict.fromkeys(command for page in PAGES for command in commands(page)))


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder as a reader has it after a short run: records of two paths, and the committed ones."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "runs").mkdir()
    (folder / "runs" / "reference").symlink_to(ROOT / "runs" / "reference")
    here = Path.cwd()
    os.chdir(folder)
    try:
        assert cli.main(["run", "engine=fake", "path=[stock,full]", "launches=2"]) == 0
        assert store.load("latest")
        yield folder
    finally:
        os.chdir(here)


def hydra(name: str, load: Callable[[object], object]) -> Callable[[list[str]], None]:
    def check(words: list[str]) -> None:
        multirun = "-m" in words
        typed = [word for word in words if word not in ("-m", "--cfg", "job")]
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            load(compose(name, overrides=prepare(typed, multirun)))

    return check


def run_of(words: list[str]) -> None:
    register_schema()
    hydra("config", lambda composed: sweep_cases(config_checks.load(composed)))(words)  # type: ignore[arg-type]
    if any(word == "engine=fake" for word in words):
        assert cli.main(["run", *words]) == 0


def kernels_of(words: list[str]) -> None:
    kernels_config.register_schema()
    hydra("kernels", lambda composed: kernels_config.requests(kernels_config.load(composed)))(words)  # type: ignore[arg-type]


def executed(verb: str, *more: str, codes: tuple[int, ...] = (0,)) -> Callable[[list[str]], None]:
    def check(words: list[str]) -> None:
        assert cli.main([verb, *words, *more]) in codes

    return check


def gate_of(words: list[str]) -> None:
    """Its options; the records that the page made beforehand are not here."""
    from prefixbench.verbs.gate import _parser

    _parser().parse_args(words)


def calibrate_of(words: list[str]) -> None:
    calibrate_cli._parser().parse_args(words)


def numerics_of(words: list[str]) -> None:
    from prefixbench.config import numerics as numerics_config

    numerics_config.register_schema()
    hydra("numerics", numerics_config.load)(words)  # type: ignore[arg-type]


VERBS: dict[str, Callable[[list[str]], None]] = {
    "run": run_of,
    "kernels": kernels_of,
    "numerics": numerics_of,
    "again": lambda words: again.parser().parse_args(words),
    "fragmentation": lambda words: fragmentation._parser().parse_args(words),
    "gate": gate_of,
    "watching": lambda words: watching._parser().parse_args(words),  # the dear run before it is not made here
    "calibrate": calibrate_of,
    "reproduce": executed("reproduce", "--plan-only"),
    "outside": executed("outside", "--plan-only"),
    "doctor": executed("doctor", codes=(0, 1)),
    "targets": executed("targets", codes=(0, 1)),
    "regret": executed("regret", codes=(0, 1)),
    "compare": executed("compare", codes=(0, 3)),  # 3: what the page compares is not comparable here, and told so
    **{verb: executed(verb) for verb in ("show", "export", "scorecard", "report", "predict", "workcounts")},
}


def check_prefixbench(words: list[str]) -> None:
    verb, *arguments = words
    if verb in ("--help", "doctor") or "--help" in arguments:
        assert cli.main(words) in (0, 1)
        return
    assert verb in cli.verbs(), f"no verb {verb}"
    VERBS[verb](arguments)


def check_make(words: list[str]) -> None:
    done = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def check_server(words: list[str]) -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "srt" / "server_args.py").read_text()
    for option in (word for word in words if word.startswith("--")):
        assert option.removeprefix("--").replace("-", "_") in source, option
    told = dict(itertools.pairwise(words))
    assert (told["--decode-attention-backend"], told["--radix-cache-backend"]) == ("prefixonce", "prefixonce")


def check_python(words: list[str]) -> None:
    assert words[0] == "-m"
    if words[1] == "prefixbench.cli":
        check_prefixbench(words[2:])
    else:
        assert words[1] == "sglang.launch_server"
        check_server(words[2:])


def check_pip(words: list[str]) -> None:
    assert words[0] == "install"
    for target in words[1:]:
        assert (ROOT / target / "pyproject.toml").is_file(), target


def check_docker(words: list[str]) -> None:
    if words[0] == "build":
        assert stage((ROOT / "Dockerfile").read_text(), words[words.index("--target") + 1])
    else:
        assert words[0] == "run"
        image = next(i for i, word in enumerate(words) if word.startswith("prefixonce"))
        assert "-v" in words[:image], "results would be lost with the container"
        check_prefixbench(words[image + 1 :])


def check_curl(words: list[str]) -> None:
    """The path is one that SGLang's server answers."""
    path = "/" + words[-1].rpartition("/")[2]
    (sglang,) = importlib.util.find_spec("sglang").submodule_search_locations
    assert f'"{path}"' in Path(sglang, "srt/entrypoints/http_server.py").read_text()


PROGRAMS = {
    "prefixbench": check_prefixbench,
    ".venv/bin/prefixbench": check_prefixbench,
    "make": check_make,
    "python": check_python,
    "python3": check_python,
    "pip": check_pip,
    "docker": check_docker,
    "curl": check_curl,
}


@pytest.mark.parametrize("command", ALL, ids=str)
def test_a_command_of_the_documentation(
    command: Command, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = list(command.words)
    while "=" in words[0]:
        name = words.pop(0).partition("=")[0]
        assert name in VARIABLES or name == "PYTHONPATH", name
    assert words[0] in PROGRAMS, f"nothing here checks {words[0]!r}"
    PROGRAMS[words[0]](words[1:])


def test_every_page_is_read_and_every_shell_block_gives_commands() -> None:
    assert len(ALL) > 40
    for page in PAGES:
        for block in SHELL.findall(page.read_text()):
            assert block.strip()
    assert {"README.md", "docs/serve.md", "docs/reproduce.md", "docs/gate.md"} <= {command.page for command in ALL}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_a_wrong_command_would_be_found(workplace: Path) -> None:
    with pytest.raises(Exception, match="no verb mesure"):
        check_prefixbench(["mesure"])
    with pytest.raises(Exception, match="prefixlen"):
        check_prefixbench(["run", "prefixlen=512"])
    with pytest.raises(AssertionError):
        check_make(["reproduse"])
    with pytest.raises(AssertionError):
        check_server(["--model-path", "X", "--decode-atention-backend", "prefixonce"])
