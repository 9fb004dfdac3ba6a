"""docs/coming_from.md: our side of every map exists."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from armillary.cli.main import command
from armillary.fleet.gateway.gateway_config import GatewaySettings, ModelSettings, ReplicaSettings
from armillary.spec.recipe import TABLES

TEXT = (Path(__file__).parent.parent / "docs" / "coming_from.md").read_text()
GATEWAY = {"gateway": GatewaySettings, "models[]": ModelSettings, "models[].replicas[]": ReplicaSettings}


def test_keys_exist() -> None:
    found = re.findall(r"`(layout|train|serve|gateway|models\[\](?:\.replicas\[\])?)\.(\w+)", TEXT)
    assert len(found) > 30
    for table, key in found:
        owner = GATEWAY.get(table) or TABLES[table]
        assert key in {field.name for field in fields(owner)}, f"{table}.{key}"


def test_options_exist() -> None:
    for line in re.findall(r"^armillary (import .*?)(?:  +#.*)?$", TEXT, re.MULTILINE):
        words = line.split()
        group = command()
        verb = group.get_command(group.make_context("armillary", ["import"]), "import")
        assert verb is not None and verb.make_context("import", words[1:]).params["file"]
