"""Puts the page together from a selection and writes it: index.html, report.md, report.json."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from prefixbench.analysis.claims.scorecard import scorecard
from prefixbench.errors import StoreError
from prefixbench.output import write_whole
from prefixbench.record import Record
from prefixbench.report import markdown, render
from prefixbench.report.material import Material
from prefixbench.report.sections import again, answer
from prefixbench.report.sections.amdahl import amdahl_section
from prefixbench.report.sections.attribution import attribution_section
from prefixbench.report.sections.dispatcher import dispatcher_section
from prefixbench.report.sections.gate import gate_section
from prefixbench.report.sections.numerics import numerics_section
from prefixbench.report.sections.outside import outside_section
from prefixbench.report.sections.paths import paths_section, violations
from prefixbench.report.sections.placement import flow_section
from prefixbench.report.sections.pool import memory_section
from prefixbench.report.sections.reads import reads_section
from prefixbench.report.sections.results import results_section
from prefixbench.report.sections.scorecard import scorecard_section, tile
from prefixbench.report.view import Download, Note, Page, Section
from prefixbench.report.words import LABEL_MEANING

TITLE = "Read the shared prompt once"
HTML_FILE, MARKDOWN_FILE, JSON_FILE = "index.html", "report.md", "report.json"


@dataclass(frozen=True)
class Selected:
    """Records and the words that chose them, as typed."""

    selector: str
    records: tuple[Record, ...]


def build(name: str, selected: Selected, compared: Selected | None = None, *, now: datetime | None = None) -> Page:
    """The whole report as data; pure but for the clock."""
    material = Material(selected.records, selected.selector)
    command = ["prefixbench", "report", *selected.selector.split(), "-o", f"reports/{name}"]
    if compared is not None:
        command += ["--compare", compared.selector]
    claims = scorecard(selected.records, evidence=None if material.invented else material.evidence)
    sections = (
        answer.answer_section(material),
        memory_section(selected.records),
        flow_section(selected.records),
        reads_section(material),
        dispatcher_section(material),
        paths_section(material),
        numerics_section(selected.records),
        results_section(material),
        outside_section(selected.records),
        attribution_section(material),
        amdahl_section(material),
        scorecard_section(claims),
        gate_section(compared.records if compared else None, selected.records, compared.selector if compared else ""),
        again.again_section(selected.records, selected.selector, shlex.join(command)),
    )
    page = Page(
        name=name,
        title=TITLE,
        subtitle=answer.subtitle(material),
        generated_at=(now or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC"),
        headline=answer.headline(material),
        tiles=(*answer.tiles(material), tile(claims)),
        badges=answer.badges(material),
        warnings=answer.warnings(material),
        violations=violations(material),
        sections=tuple(_labelled(section, material) for section in sections),
        record_ids=tuple(record.record_id for record in selected.records),
        downloads=(),
    )
    return replace(page, downloads=_downloads(material, page))


# Which kinds of records the numbers of a section come from.
_SOURCES = {
    "memory": ("serving",),
    "placement": ("serving",),
    "reads": ("kernel", "serving"),
    "dispatcher": ("kernel", "dispatch"),
    "paths": ("serving",),
    "numerics": ("numerics",),
    "results": ("serving",),
    "outside": ("outside",),
    "attribution": ("serving",),
    "amdahl": ("serving",),
}


def _labelled(section: Section, material: Material) -> Section:
    """The section with the labels of its records, where it shows numbers at all."""
    kinds = _SOURCES.get(section.id, ())
    if all(isinstance(block, Note) for block in section.blocks):
        return section
    labels = dict.fromkeys(label for r in material.records if r.case.kind in kinds for label in r.labels)
    return replace(section, labels=tuple(LABEL_MEANING.get(label, (label, ""))[0] for label in labels))


def write(page: Page, folder: Path) -> Path:
    """Writes the three files; returns the path of the HTML one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{folder} cannot be the folder of a report: {error.strerror}") from None
    for name, text in (
        (HTML_FILE, render.html(page)),
        (MARKDOWN_FILE, markdown.markdown(page)),
        (JSON_FILE, next(file.text for file in page.downloads if file.name == JSON_FILE)),
    ):
        write_whole(folder / name, text)
    return folder / HTML_FILE


def _downloads(material: Material, page: Page) -> tuple[Download, ...]:
    files = [Download(JSON_FILE, "Every table", "application/json", render.json(page))]
    for name, label, rows in (
        ("launches.csv", "Serving, by launch", material.launches),
        ("kernels.csv", "Kernels, by timing", material.kernels),
    ):
        if not rows.empty:
            files.append(Download(name, label, "text/csv", rows.to_csv(index=False)))
    return tuple(files)
