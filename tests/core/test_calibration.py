"""Measured costs of the gate: stored whole, found by the layer's name, refused by name where there are none."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megaflux_serve.cli import calibrate
from megaflux_serve.cli.app import app
from megaflux_serve.config import MegaFluxConfig
from megaflux_serve.errors import ConfigError, UnsupportedError
from megaflux_serve.planning.calibration import (
    CALIBRATION_VARIABLE,
    calibration_path,
    layer_name,
    load_costs,
    store_costs,
)
from megaflux_serve.planning.gate import GateCosts

SMALL, LARGE = GateCosts(1_500, 27_000, 8_000, 0), GateCosts(14_300, 252_000, 8_000, 600)


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "new" / "calibration.json"
    monkeypatch.setenv(CALIBRATION_VARIABLE, str(path))
    return path


def test_the_file_lies_in_the_user_s_cache_unless_the_variable_names_another(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert calibration_path() == file
    monkeypatch.delenv(CALIBRATION_VARIABLE)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert calibration_path() == tmp_path / ".cache" / "megaflux" / "calibration.json"


def test_stored_costs_come_back_and_those_of_other_layers_stay(file: Path) -> None:
    store_costs(layer_name(2048, 768), LARGE, "H200")
    store_costs("7168x2048", LARGE, "H200")
    store_costs("2048x768", SMALL, "H200")
    assert (load_costs("2048x768"), load_costs("7168x2048")) == (SMALL, LARGE)
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_costs_of_another_device_are_dropped(file: Path) -> None:
    store_costs("2048x768", SMALL, "H200")
    store_costs("7168x2048", LARGE, "B200")
    assert json.loads(file.read_text())["device"] == "B200"
    with pytest.raises(ConfigError, match=r"layer = '2048x768' .*has 7168x2048"):
        load_costs("2048x768")


def test_a_configuration_names_a_measured_layer() -> None:
    store_costs("2048x768", SMALL, "H200")
    assert MegaFluxConfig.parse({"gate": "2048x768"}).gate == SMALL
    with pytest.raises(ConfigError, match=r"gate.layer = '64x64' .*megaflux calibrate"):
        MegaFluxConfig.parse({"gate": "64x64"})


@pytest.mark.parametrize(
    "content", ["", "[]", pytest.param("[" * 100_000, id="deep"), '{"layers": {}}', '{"device": "H200", "layers": []}']
)
def test_a_damaged_file_is_refused_and_named(file: Path, content: str) -> None:
    file.parent.mkdir()
    file.write_text(content)
    with pytest.raises(ConfigError, match=f"{CALIBRATION_VARIABLE} = .*calibration.json.*remove it"):
        load_costs("2048x768")


@pytest.mark.parametrize(
    ("held", "damage"),
    [
        ("plan_ns", "plan"),
        ("1500", "1500.5"),
        ("1500", "NaN"),
        ("1500", "true"),
        ('"2048x768": {', '"2048x768": 5, "b": {'),
    ],
)
def test_costs_that_are_not_four_integers_are_refused(held: str, damage: str, file: Path) -> None:
    store_costs("2048x768", SMALL, "H200")
    file.write_text(file.read_text().replace(held, damage))
    with pytest.raises(ConfigError, match="measure it again"):
        load_costs("2048x768")


@pytest.mark.parametrize(("option", "value"), [("ranks", 3), ("ranks", 1), ("top-k", 0), ("tokens", 0)])
def test_the_command_names_the_number_that_it_refuses(option: str, value: int) -> None:
    command = ["calibrate", "--hidden", "2048", "--intermediate", "768", f"--{option}", str(value)]
    refused = CliRunner().invoke(app, command)
    assert (refused.exit_code, f"--{option} = {value}" in refused.output) == (2, True)


def test_the_command_needs_gpus(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    command = ["calibrate", "--hidden", "2048", "--intermediate", "768"]

    def no_device(ranks: int) -> str:
        raise UnsupportedError("calibrate", f"torch sees 0 GPUs, not {ranks}", "give the gate's costs as JSON")

    monkeypatch.setattr(calibrate, "usable_device", no_device)
    refused = CliRunner().invoke(app, command)
    assert (refused.exit_code, "torch sees 0 GPUs" in refused.output, file.exists()) == (2, True, False)
