"""``megaflux plan``: a trace small enough to plan by hand, every option, and every refusal."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from megaflux_serve.cli import app

# Blocks of two rows: b = [4, 0, 1, 1], so rank 0 has 4 blocks and rank 1 has 2. The target is 3: one block of expert 0
# goes to a replica on rank 1, and both ranks end with 3 blocks, 6 rows.
COUNTS = "layer,expert,count\n0,0,8\n0,2,2\n0,3,2\n"
BALANCED = "1,0,3\n1,1,3\n1,2,3\n1,3,3\n"
PNG = b"\x89PNG\r\n\x1a\n"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


@pytest.fixture
def counts(tmp_path: Path) -> Path:
    file = tmp_path / "counts.csv"
    file.write_text(COUNTS)
    return file


def plan_to_json(folder: Path, *arguments: object) -> dict[str, object]:
    result = run(*arguments, "--json", folder / "plan.json")
    assert result.exit_code == 0, result.output
    return json.loads((folder / "plan.json").read_text())


def test_the_figures_of_a_plan_made_by_hand(counts: Path) -> None:
    figures = plan_to_json(counts.parent, counts, "--ranks", 2, "--slots", 1, "--block-rows", 2)
    assert figures["layers"] == [
        {
            "layer": "0",
            "num_batches": 1,
            "kappa": 2.0,
            "max_over_mean_before": 8 / 6,
            "max_over_mean_after": 1.0,
            "eta": 1.0,
            "replicas": 1,
            "blocks_moved": 1,
            "transfers": 1,
            "speedup": 4 / 3,
            "gated": 0,
            "fixed_loads": [8, 4],
            "loads": [6, 6],
        }
    ]
    assert figures["transfers"] == {"made": 1, "without_sticky": 1}


def test_a_model_is_as_fast_as_its_layers_one_after_the_other(counts: Path) -> None:
    counts.write_text(COUNTS + BALANCED)
    total = plan_to_json(counts.parent, counts, "--ranks", 2, "--slots", 1, "--block-rows", 2)["total"]
    # Layer 1 has 4 blocks on either rank before and after; the busiest ranks compute 4 + 4 blocks before, 3 + 4 after.
    assert total["speedup"] == 8 / 7
    assert (total["replicas"], total["blocks_moved"], total["transfers"]) == (1, 1, 1)
    assert total["eta"] == 1.0  # layer 1 has no excess and does not count


def test_the_table_shows_the_same_figures(counts: Path) -> None:
    counts.write_text(COUNTS + BALANCED)
    result = run(counts, "--ranks", 2, "--slots", 1, "--block-rows", 2)
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["0", "2.00", "1.333", "1.000", "100.0", "%", "1", "1", "1", "1.33x"] in rows
    assert ["1", "1.00", "1.000", "1.000", "-", "0", "0", "0", "1.00x"] in rows
    assert f"{counts}: 2 layers, 4 experts (largest id + 1; --experts sets it)" in result.stdout


def test_names_are_shown_as_they_are_and_style_nothing(tmp_path: Path) -> None:
    file = tmp_path / "of[bold]them.json"
    file.write_text(json.dumps({"[/a]": {"x[red]": [8, 0, 2, 2], "[/x]": [3, 3, 3, 3]}}))
    result = run(file, "--ranks", 2, "--json", tmp_path / "[/b].json")
    assert result.exit_code == 0, result.output
    for shown in ("of[bold]them.json: 2 layers", "layers of [/a]", "x[red]", "[/x]", "[/b].json"):
        assert shown in result.stdout


def test_sticky_replicas_are_sent_once(tmp_path: Path) -> None:
    batch = [0] * 8 + [2] * 2 + [3] * 2
    np.save(tmp_path / "ids.npy", np.array(batch * 3, dtype=np.uint8)[:, None, None])
    options = (tmp_path / "ids.npy", "--ranks", 2, "--slots", 1, "--block-rows", 2, "--batch-tokens", 12)
    assert plan_to_json(tmp_path, *options)["transfers"] == {"made": 3, "without_sticky": 3}
    assert plan_to_json(tmp_path, *options, "--sticky")["transfers"] == {"made": 1, "without_sticky": 3}
    assert "3 without --sticky, 1 with it (67 % saved)" in run(*options, "--sticky").stdout
    assert "3 batches of 12 tokens, medians over batches" in run(*options).stdout


def test_a_replica_that_wins_no_more_than_it_costs_is_not_opened(counts: Path) -> None:
    options = (counts, "--ranks", 2, "--slots", 1, "--block-rows", 2, "--transfer-cost-blocks", 1)
    assert plan_to_json(counts.parent, *options)["total"]["speedup"] == 1.0


def test_the_gate_charges_planning_and_transfers_and_drops_what_does_not_pay(counts: Path) -> None:
    options = (counts, "--ranks", 2, "--slots", 1, "--block-rows", 2, "--gate")
    # 4 blocks of 100 ns before; after it 3 blocks, 10 ns of planning and half of a 60 ns transfer.
    cheap = '{"block_ns": 100, "replica_ns": 60, "plan_ns": 10, "hidden_permille": 500}'
    assert plan_to_json(counts.parent, *options, cheap)["total"]["speedup"] == 400 / 340
    dear = '{"block_ns": 100, "replica_ns": 180, "plan_ns": 10, "hidden_permille": 500}'
    (layer,) = plan_to_json(counts.parent, *options, dear)["layers"]
    assert (layer["gated"], layer["replicas"], layer["speedup"]) == (1, 0, 400 / 410)
    assert "gate: 1 of 1 plans did not pay and were dropped" in run(*options, dear).stdout


def test_counts_can_be_scaled_and_rebinned(counts: Path) -> None:
    options = (counts, "--ranks", 2, "--slots", 1, "--block-rows", 2, "--tokens-per-rank", 12, "--top-k", 1)
    (scaled,) = plan_to_json(counts.parent, *options)["layers"]
    assert (scaled["kappa"], scaled["fixed_loads"], scaled["loads"]) == (2.0, [16, 8], [12, 12])
    (rebinned,) = plan_to_json(counts.parent, *options, "--rebin", 8)["layers"]
    assert sum(rebinned["loads"]) == 24
    assert rebinned["kappa"] == pytest.approx(2.0)  # each expert becomes two of half its load


def test_the_picture_is_a_png_for_few_and_for_many_layers(tmp_path: Path) -> None:
    for num_layers in (3, 20):
        (tmp_path / "counts.json").write_text(json.dumps([[5, 1, 1, layer] for layer in range(num_layers)]))
        result = run(tmp_path / "counts.json", "--ranks", 2, "--slots", 1, "--png", tmp_path / "new" / "loads.png")
        assert result.exit_code == 0, result.output
        assert (tmp_path / "new" / "loads.png").read_bytes().startswith(PNG)
        assert [file.name for file in (tmp_path / "new").iterdir()] == ["loads.png"]


BAD_OPTIONS = {
    ("--ranks", 3): "--ranks = 3 is not allowed; allowed: divisors of the 4 experts of layer 0: 2, 4",
    ("--ranks", 0): "--ranks = 0 is not allowed; allowed: divisors of the 4 experts of layer 0: 2, 4",
    ("--ranks", 2, "--slots", -1): "--slots = -1 is not allowed; allowed: an integer of at least 0",
    ("--ranks", 2, "--slots", 3): "--slots = 3 is not allowed; allowed: 0 to 2, the experts that a rank does not own",
    ("--ranks", 2, "--block-rows", 0): "--block-rows = 0 is not allowed; allowed: an integer from 1 to 128",
    ("--ranks", 2, "--experts", 3): "layer 0: holds expert id 3; allowed: ids 0 to 2",
    ("--ranks", 2, "--experts", 0): "--experts = 0 is not allowed; allowed: an integer of at least 1",
    ("--ranks", 2, "--experts", 10**12): "--experts = 1000000000000 is not allowed; allowed: an integer of at least 1",
    ("--ranks", 2, "--layer", 7): "layer: none is called '7'; allowed: 0",
    ("--ranks", 2, "--batch-tokens", 4): "layer 0: holds totals, not tokens; allowed: routed-expert arrays for batches",
    ("--ranks", 2, "--batch-tokens", 0): "layer 0: holds totals, not tokens; allowed: routed-expert arrays for batches",
    ("--ranks", 2, "--rebin", 8): "--rebin = 8 is not allowed; allowed: only together with --tokens-per-rank",
    ("--ranks", 2, "--top-k", 2): "--top-k = 2 is not allowed; allowed: only together with --tokens-per-rank",
    ("--ranks", 2, "--tokens-per-rank", 8): "--top-k: is missing; allowed: experts a token",
    ("--ranks", 2, "--tokens-per-rank", 0, "--top-k", 1): "--tokens-per-rank = 0 is not allowed; allowed: an integer",
    ("--ranks", 2, "--tokens-per-rank", 8, "--top-k", 0): "--top-k = 0 is not allowed; allowed: an integer",
    ("--ranks", 2, "--tokens-per-rank", 8, "--top-k", 5): "--top-k = 5 is not allowed; allowed: 1 to the 4 experts",
    ("--ranks", 2, "--tokens-per-rank", 2**31, "--top-k", 1): "--tokens-per-rank = 2147483648 is not allowed; allowed",
    ("--ranks", 2, "--tokens-per-rank", 8, "--top-k", 1, "--rebin", 2**17): "--rebin = 131072 is not allowed; allowed",
    ("--ranks", 2, "--gate", "{"): "--gate = '{' is not allowed; allowed: integers block_ns, replica_ns",
    ("--ranks", 2, "--gate", "auto"): "--gate = 'auto' is not allowed; allowed: integers block_ns, replica_ns",
    ("--ranks", 2, "--gate", "{}"): "--gate = '{}' is not allowed; allowed: integers block_ns, replica_ns",
    ("--ranks", 2, "--json", "/"): "--json = '/' is not allowed; allowed: a file, in a folder that can be written",
    ("--ranks", 2, "--json", "/dev/null"): "--json = '/dev/null' is not allowed; allowed: a file, in a folder",
    (
        "--ranks",
        2,
        "--png",
        "/dev/null/a.png",
    ): "--png = '/dev/null/a.png' is not allowed; allowed: a file, in a folder",
    ("--ranks", 2, "--transfer-cost-blocks", -1): "--transfer-cost-blocks = -1 is not allowed; allowed: an integer",
    ("--ranks", 2, "--transfer-cost-blocks", 2**31): "--transfer-cost-blocks = 2147483648 is not allowed; allowed: an",
}


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=lambda options: " ".join(map(str, options)))
def test_a_bad_option_is_one_line_that_names_it_and_status_2(options: tuple[object, ...], counts: Path) -> None:
    result = run(counts, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error: ")
    assert BAD_OPTIONS[options] in result.stderr


def test_a_broken_trace_is_one_line_that_names_the_file_and_writes_nothing(counts: Path) -> None:
    counts.write_text("layer,expert,count\n0,0,-1\n")
    result = run(counts, "--ranks", 2, "--json", counts.parent / "plan.json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: {counts}: line 2: count is -1; allowed: whole numbers from 0 to 2147483647\n"
    assert not (counts.parent / "plan.json").exists()


@pytest.mark.parametrize("rebin", [(), ("--rebin", 8)])
def test_a_layer_without_rows_for_a_token_s_experts_is_not_scaled(rebin: tuple[object, ...], tmp_path: Path) -> None:
    (tmp_path / "counts.csv").write_text("layer,0,1,2,3\nfull,9,9,9,9\nidle,0,0,0,0\n")
    result = run(tmp_path / "counts.csv", "--ranks", 2, "--tokens-per-rank", 8, "--top-k", 2, *rebin)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "error: layer idle: a batch has rows for 0 experts; allowed: at least 2" in result.stderr


@pytest.mark.parametrize("batch_tokens", [0, 5])
def test_a_batch_that_the_trace_has_not_is_refused_by_its_flag(batch_tokens: int, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.tile(np.arange(2), (4, 1, 1)))
    result = run(tmp_path / "ids.npy", "--ranks", 2, "--slots", 1, "--batch-tokens", batch_tokens)
    allowed = "1 to 4, the tokens of the trace"
    assert result.stderr == f"error: --batch-tokens = {batch_tokens} is not allowed; allowed: {allowed}\n"


def test_help_breaks_paragraphs_where_the_terminal_ends() -> None:
    text = CliRunner().invoke(app, ["plan", "--help"], env={"COLUMNS": "90", "TERM": "dumb"}).stdout
    paragraph = text.split("replication do for my routing?")[1].split("Without --gate")[0].split("\n")
    assert max(map(len, paragraph)) <= 90
    assert all(len(line.strip()) > 60 for line in paragraph[2:4])


def test_the_version_and_a_help_with_examples_are_printed() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout.startswith("megaflux-serve 0.")
    assert "megaflux plan routed_experts.npz --ranks 8" in CliRunner().invoke(app, ["--help"]).stdout
