"""One real plan for all tests of documents."""

from __future__ import annotations

import pytest

from armillary.documents.blocks import Report
from armillary.documents.facts import PlanFacts
from armillary.documents.plan_report import build_report
from armillary.store.home import Home
from tests.documents import made


@pytest.fixture(scope="session")
def plan_facts(tmp_path_factory: pytest.TempPathFactory) -> PlanFacts:
    return made.facts(Home.at(tmp_path_factory.mktemp("documents")))


@pytest.fixture(scope="session")
def plan_report(plan_facts: PlanFacts) -> Report:
    return build_report(plan_facts)
