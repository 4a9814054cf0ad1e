"""Sections of the page, one module each: records and figures of `analysis` in, a `view.Section` out."""
