"""The appendix of every format: all figures with value, source and formula."""

from armillary.documents.blocks import Report

COLUMNS = ("name", "figure", "value", "source or formula")
TITLE = "Appendix: table of figures"


def figure_rows(report: Report) -> list[list[str]]:
    """One row per figure; formulas use the names."""
    return [
        [figure.key, figure.label, report.figures.text(figure.key, short=False), figure.formula or figure.source]
        for figure in report.figures
    ]
