"""`armillary up` reads a service and registers its model; `armillary rollout` asks for another release."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from armillary.cli.output import Output
from armillary.cli.rollout import rollout
from armillary.cli.up import read_service, registered, up
from armillary.errors import BadInput, NotFound
from armillary.fleet.gateway import run_gateway
from armillary.fleet.gateway.gateway_config import GatewayConfig
from armillary.fleet.rollout.rollout_record import read_rollout
from armillary.spec.recipe import recipe_from_dict
from armillary.store.home import Home
from armillary.store.registry.open_registry import open_registry
from tests.store.conftest import write_model


def test_a_service_is_a_recipe_with_a_gateway(tmp_path: Path) -> None:
    recipe, gateway = read_service(Path("recipes/service.toml"), ("autoscale.max_replicas=5",))
    assert recipe.autoscale.max_replicas == 5 and gateway.retries == 2
    file = tmp_path / "service.toml"
    file.write_text('[model]\npath = "x"\n[gateway]\nretrys = 2\n')
    with pytest.raises(BadInput, match="retries"):
        read_service(file, ())


def test_a_model_is_pushed_once(tmp_path: Path) -> None:
    home, folder = Home.at(tmp_path / "home"), write_model(tmp_path / "bot")
    recipe = recipe_from_dict({"model": {"path": str(folder)}})
    for _ in range(2):
        assert registered(Output("quiet"), home, recipe) == ("bot", "registry:bot@production")
    store = open_registry(home)
    assert store.versions("bot") == [1] and store.aliases("bot") == {"production": 1}
    already = recipe_from_dict({"model": {"path": "registry:bot@beta"}})
    assert registered(Output("quiet"), home, already) == ("bot", "registry:bot@beta")


def test_a_rollout_is_asked_for(tmp_path: Path) -> None:
    home, folder = Home.at(tmp_path / "home"), write_model(tmp_path / "bot")
    open_registry(home).push("bot", folder, evals={"mmlu": 0.5})
    service = home.work / "services" / "bot"

    def call(*args: str) -> object:
        result = CliRunner().invoke(rollout, ["bot", *args, "--home", str(tmp_path / "home")])
        return result.exception or result.output

    assert isinstance(call("bot:1"), NotFound)
    service.mkdir(parents=True)
    refused = call("bot:1", "--eval", "mmlu=0.6")
    assert isinstance(refused, BadInput) and "less than 0.6" in str(refused) and read_rollout(service) is None
    assert "canary" in str(call("bot:1", "--share", "0.2", "--eval", "mmlu=0.4"))
    asked = read_rollout(service)
    assert asked is not None and (asked.release, asked.share) == ("registry:bot:1", 0.2)
    assert "goes on" in str(call("bot:1"))
    assert "canary" in str(call())


def test_it_runs_here_where_no_target_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the gateway's event loop."""
    ran: list[GatewayConfig] = []
    monkeypatch.setattr(run_gateway, "run_gateway", lambda config, *args, **more: ran.append(config))
    folder, file = write_model(tmp_path / "bot"), tmp_path / "service.toml"
    file.write_text(f'[model]\npath = "{folder}"\n[gateway]\nretries = 1\n')
    result = CliRunner().invoke(up, [str(file), "--home", str(tmp_path / "home")])
    assert result.exception is None, result.output
    (config,) = ran
    assert [model.name for model in config.models] == ["bot"] and config.gateway.retries == 1
    assert "model" in (tmp_path / "home/services/bot/replica.toml").read_text()
