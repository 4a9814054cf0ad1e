"""Runs the steps of the Dockerfile's CPU target in a folder and an environment of their own: `make container-steps`.

The steps are read from the Dockerfile, so they cannot drift from it. What only a container can do is stood in for: the
folder is the root, `useradd` and `chown` are checked and do nothing, apt-get only simulates.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SIMULATED = '#!/bin/sh\ncase "$1" in update) exit 0;; esac\nexec /usr/bin/apt-get --simulate "$@"\n'
STAND_INS = {"useradd": "#!/bin/sh\nexit 0\n", "chown": '#!/bin/sh\ntest -e "$2"\n', "apt-get": SIMULATED}


@dataclass(frozen=True)
class Step:
    """One instruction of a Dockerfile: RUN, COPY, ..."""

    instruction: str
    text: str


def stage(dockerfile: str, name: str) -> list[Step]:
    """The instructions of one target, FROM included; continued lines joined, comments dropped."""
    lines = [line for line in dockerfile.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    stages: dict[str, list[Step]] = {}
    for line in filter(str.strip, joined.splitlines()):
        instruction, _, text = line.partition(" ")
        if instruction == "FROM":
            current = stages.setdefault(text.rpartition(" AS ")[2], [])
        current.append(Step(instruction, text.strip()))
    return stages[name]


class Container:
    """A folder that stands for the root of the container, and what its instructions have set so far."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.work = root
        self.environment = {**os.environ, "HOME": str(root / "home")}
        self.entry: list[str] = []
        venv, shims = root / "venv", root / "shims"
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        shims.mkdir()
        for command, script in STAND_INS.items():
            (shims / command).write_text(script)
            (shims / command).chmod(0o755)
        self.environment["PATH"] = f"{shims}:{venv / 'bin'}:{os.environ['PATH']}"
        self.environment.pop("PYTHONPATH", None)
        self.python = venv / "bin" / "python3"

    def apply(self, step: Step) -> None:
        if step.instruction == "ENV":
            self.environment |= dict(word.split("=", 1) for word in shlex.split(step.text))
        elif step.instruction == "WORKDIR":
            self.work = self.inside(step.text)
            self.work.mkdir(parents=True, exist_ok=True)
        elif step.instruction == "COPY":
            *sources, target = step.text.split()
            for source in sources:
                self.copy(source, self.work / target)
        elif step.instruction == "RUN":
            self.run(step.text)
        elif step.instruction in ("ENTRYPOINT", "CMD"):
            self.entry += re.findall(r'"([^"]*)"', step.text)

    def inside(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def copy(self, source: str, target: Path) -> None:
        """A folder's content goes into the target, as COPY does; only what is under version control."""
        listed = subprocess.run(
            ["git", "ls-files", "--", source], cwd=REPOSITORY, check=True, capture_output=True, text=True
        ).stdout.splitlines()
        if not listed:
            raise SystemExit(f"COPY {source}: no such file under version control")
        for name in listed:
            origin = REPOSITORY / name
            is_folder = name != source
            placed = target / Path(name).relative_to(source) if is_folder else target / name
            placed.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(origin, placed, follow_symlinks=False)

    def run(self, command: str) -> None:
        command = re.sub(r"(?<=\s)/(out|opt|tmp)\b", rf"{self.root}/\1", command)
        command = command.replace("uv pip install --system", f"uv pip install --python {self.python}")
        command = command.replace("rm -rf /var/lib/apt/lists/*", "true")
        sys.stdout.write(f"RUN {command}\n")
        sys.stdout.flush()
        (self.root / "tmp").mkdir(exist_ok=True)
        subprocess.run(["/bin/sh", "-e", "-c", command], cwd=self.work, env=self.environment, check=True)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="container-steps-") as folder:
        container = Container(Path(folder))
        for step in stage((REPOSITORY / "Dockerfile").read_text(), "cpu"):
            container.apply(step)
        for words in (container.entry, [container.entry[0], "reproduce", "--plan-only"]):
            sys.stdout.write(f"$ {' '.join(words)}\n")
            sys.stdout.flush()
            subprocess.run(words, cwd=container.work, env=container.environment, check=True)
        sys.stdout.write("every step of the CPU target ran\n")


if __name__ == "__main__":
    main()
