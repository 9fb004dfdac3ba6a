"""The recipe's [report] table: whose document it is, in which currency, and what a plan cannot compute."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Literal

from armillary.errors import BadRecipe
from armillary.spec.tables.checks import above_zero, at_least, refuse

PHASES: Mapping[str, int] = {"procurement": 60, "data": 14, "acceptance": 5, "evaluation": 7, "rollout": 10}
"""calendar days of each phase around a training run, as assumed unless report.days says otherwise: delivery of bought
machines, preparing data, burn-in and a canary run, evaluation, and the roll-out of a service"""


@dataclass(frozen=True, kw_only=True)
class ReportTable:
    """Documents that `armillary report` writes."""

    title: str = ""
    """title of the documents; empty: from the model and the devices"""
    company: str = ""
    """named on the first page and in the footer"""
    logo: str = ""
    """PNG or JPEG file for the first page"""
    currency: str = "USD"
    """ISO 4217 code of all amounts"""
    currency_per_usd: float = 1.0
    """units of that currency per US dollar, which prices are in"""
    date_format: str = "%Y-%m-%d"
    """as strftime of Python takes it: %d.%m.%Y, %d %B %Y"""
    template: tuple[str, ...] = ()
    """.docx and .pptx files whose styles and master slides are used, .typ in place of our typst template"""
    start: str = ""
    """first day of the project, as 2026-12-01; empty: today"""
    days: Mapping[str, int] = field(default_factory=dict)
    """calendar days of the phases procurement, data, acceptance, evaluation and rollout"""
    budget_usd: float | None = None
    """budget for the first year, in dollars"""
    data_class: Literal["public", "internal", "personal", "regulated"] = "internal"
    """most sensitive data that the model is trained on or serves"""
    region: str = ""
    """where data may be stored and processed"""
    compliance: tuple[str, ...] = ()
    """regimes that apply, like GDPR, SOC 2, HIPAA"""

    def __post_init__(self) -> None:
        above_zero(self, "report", "currency_per_usd")
        at_least(self, "report", 0, "budget_usd")
        if not (len(self.currency) == 3 and self.currency.isascii() and self.currency.isalpha()):
            raise refuse(self, "report", "currency", "a code of three letters")
        if self.currency.upper() != "USD" and self.currency_per_usd == 1.0:
            raise BadRecipe(
                f"report.currency={self.currency} needs its rate; try --set report.currency_per_usd=0.92 (per dollar)"
            )
        for name, days in self.days.items():
            if name not in PHASES or days < 0:
                raise BadRecipe(f"report.days has {name} = {days}; it takes 0 or more days of {', '.join(PHASES)}")
        self.first_day(date.today())
        if "%" not in self.date_format or not date(2026, 12, 1).strftime(self.date_format).strip():
            raise refuse(self, "report", "date_format", "a format of strftime")

    def first_day(self, today: date) -> date:
        try:
            return date.fromisoformat(self.start) if self.start else today
        except ValueError:
            raise refuse(self, "report", "start", "a date like 2026-12-01", today.isoformat()) from None

    def phase_days(self, name: str) -> int:
        return self.days.get(name, PHASES[name])
