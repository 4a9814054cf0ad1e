"""A page as HTML (one file, nothing loaded from anywhere), as Markdown and as JSON."""

from __future__ import annotations

import base64
import gzip
import hashlib
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from prefixbench.report.safe_json import clean, dumps, dumps_for_script
from prefixbench.report.view import Json, Page
from prefixbench.report.words import PATH_MEANING

_SCRIPTS = ("base.js", "charts.js", "pool.js", "placement.js", "amdahl.js", "main.js")
REPORT_SCHEMA_VERSION = 1


def html(page: Page) -> str:
    """Everything from records passes through autoescape or `dumps_for_script`; only our own files are `Markup`.

    The content security policy allows exactly the two scripts of this file, by hash, and no connection at all.
    """
    environment = Environment(
        loader=PackageLoader("prefixbench.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    plotly = _asset("vendor/plotly-basic.min.js")
    script = "(() => {\n" + "".join(_asset(name) for name in _SCRIPTS) + "})();"
    hashes = " ".join(f"'sha256-{_sha256(source)}'" for source in (plotly, script))
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    return environment.get_template("page.html").render(
        page=page,
        css=Markup(_asset("page.css")),  # noqa: S704
        policy=policy,
        legend=_legend(page),
        payload=Markup(dumps_for_script(_payload(page))),  # noqa: S704
        plotly=Markup(plotly),  # noqa: S704
        script=Markup(script),  # noqa: S704
    )


def json(page: Page) -> str:
    """The page without figures: every value that a table shows, unrounded, under its section."""
    head = {
        "schema_version": REPORT_SCHEMA_VERSION,
        "name": page.name,
        "title": page.title,
        "subtitle": page.subtitle,
        "generated_at": page.generated_at,
        "headline": page.headline,
        "tiles": page.tiles,
        "labels": [name for name, _ in page.badges],
        "warnings": page.warnings,
        "violations": page.violations,
    }
    sections = [
        {
            "id": section.id,
            "title": section.title,
            "finding": section.finding,
            "blocks": [_without_figure(clean(block)) for block in section.blocks],
        }
        for section in page.sections
    ]
    return dumps(head | {"sections": sections, "record_ids": page.record_ids}, indent=1)


def _payload(page: Page) -> dict[str, object]:
    return {
        "figures": {chart.id: chart.figure for chart in page.charts()},
        "widgets": {widget.id: widget.data for widget in page.widgets()},
        "downloads": {
            file.name: {"media_type": file.media_type, "gzip_base64": _packed(file.text)} for file in page.downloads
        },
    }


def _packed(text: str) -> str:
    """A tenth of the text's size; the browser unpacks it when asked. No time stamp: the same text packs alike."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _without_figure(value: Json) -> Json:
    """Drops what only the HTML needs: figures, and the colours and marks that a cell does not have."""
    if isinstance(value, list):
        return [_without_figure(item) for item in value]
    if not isinstance(value, dict):
        return value
    unsaid = {"figure", *(key for key in ("path", "mark") if value.get(key, "") is None)}
    return {key: _without_figure(item) for key, item in value.items() if key not in unsaid}


def _legend(page: Page) -> list[tuple[str, str]]:
    """The paths that this page mentions, in their fixed order."""
    seen = {cell.path for table in page.tables() for row in table.rows for cell in row}
    return [(path, meaning) for path, meaning in PATH_MEANING.items() if path in seen]


def _asset(name: str) -> str:
    return resources.files("prefixbench.report").joinpath("templates", name).read_text(encoding="utf-8")


def _sha256(source: str) -> str:
    return base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
