"""Build time and size of a report of a thousand records: python tests/report/measure_build.py [FOLDER]

Writes the records of a synthetic sweep to a temporary runs folder, then times the command as a user waits for it:
start of Python, reading, building, writing. Prints one JSON object and, with FOLDER, stores it there.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from prefixbench import store
from report.synthetic import sweep

RECORDS = 1000
COMMAND = "import sys; from prefixbench.verbs.report import main; sys.exit(main(sys.argv[1:]))"


def main(folder: Path | None) -> None:
    prefixes = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 12288, 16384)
    records = sweep(prefixes, (1, 4, 8, 16, 32), launches=4)[:RECORDS]
    with tempfile.TemporaryDirectory() as temporary:
        root, report = Path(temporary, "runs"), Path(temporary, "report")
        for record in records:
            store.save(record, root, {})
        command = [sys.executable, "-c", COMMAND, str(root), "-o", str(report), "--runs", str(root)]
        load_average = os.getloadavg()[0]
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        result = {
            "records": len(records),
            "record_bytes": sum(path.stat().st_size for path in root.rglob("record.json*")),
            "command_s": round(time.perf_counter() - started, 1),
            "command_cpu_s": round(sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]), 1),
            "html_bytes": (report / "index.html").stat().st_size,
            "cpu_count": os.cpu_count(),
            "load_average_before": round(load_average, 1),
            "python": platform.python_version(),
        }
    text = json.dumps(result, indent=1) + "\n"
    sys.stdout.write(text)
    if folder is not None:
        (folder / "report-build.json").write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
