"""Build time and size of a report of a thousand records: python tests/report/measure_build.py [FOLDER]

Writes the records of a synthetic sweep to a temporary runs folder, then times what a user waits for: reading them
back, building the page, writing the files. Prints one JSON object and, with FOLDER, stores it there.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from prefixbench import store
from prefixbench.report.build import Selected, build, write
from report.synthetic import sweep

RECORDS = 1000


def main(folder: Path | None) -> None:
    prefixes = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 12288, 16384)
    records = sweep(prefixes, (1, 4, 8, 16, 32), launches=4)[:RECORDS]
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary, "runs")
        for record in records:
            store.save(record, root, {})
        started = time.perf_counter()
        loaded = store.load(str(root), root)
        read = time.perf_counter()
        page = build("thousand", Selected(str(root), tuple(loaded)))
        built = time.perf_counter()
        html = write(page, Path(temporary, "report"))
        written = time.perf_counter()
        result = {
            "records": len(loaded),
            "record_bytes": sum(path.stat().st_size for path in root.rglob("record.json")),
            "read_s": round(read - started, 2),
            "build_s": round(built - read, 2),
            "write_s": round(written - built, 2),
            "total_s": round(written - started, 2),
            "html_bytes": html.stat().st_size,
            "cpu_count": os.cpu_count(),
            "load_average": round(os.getloadavg()[0], 1),
            "python": platform.python_version(),
        }
    text = json.dumps(result, indent=1) + "\n"
    sys.stdout.write(text)
    if folder is not None:
        (folder / "report-build.json").write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
