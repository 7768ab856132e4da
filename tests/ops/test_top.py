"""``megaflux top``: exact figures from a server whose metrics are known, and one clear error from any other."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rich.console import Console
from typer.testing import CliRunner

from megaflux_serve.cli.app import app
from megaflux_serve.cli.top import command
from megaflux_serve.cli.top.figures import figures
from megaflux_serve.cli.top.scrape import Change, metrics_url, scrape
from megaflux_serve.cli.top.view import view
from megaflux_serve.errors import InputError

SERVER = 'engine="vllm",model="tiny"'
WORKER = 'version="0.1.0",engine_version="0.27.1",executor="staged",sticky="true",gate="false"'


def metrics(batches: int) -> str:
    """What a server shows after so many batches of 10 tokens in each of two layers, the first of them skewed."""
    lines = ["# TYPE python_gc_objects_collected_total counter", "python_gc_objects_collected_total 7.0"]
    for layer, fixed, planned in (("0", 6, 5), ("1", 4, 4)):
        of = f'{SERVER},layer="{layer}"'
        lines += [
            f"megaflux_batches_total{{{of}}} {batches}",
            f"megaflux_tokens_total{{{of}}} {10 * batches}",
            f'megaflux_busiest_rank_blocks_total{{{of},placement="fixed"}} {fixed * batches}',
            f'megaflux_busiest_rank_blocks_total{{{of},placement="planned"}} {planned * batches}',
            f"megaflux_mean_rank_blocks_total{{{of}}} {4 * batches}",
            f"megaflux_balanced_rank_blocks_total{{{of}}} {4 * batches}",
            f'megaflux_rank_blocks_total{{{of},rank="0",placement="fixed"}} {fixed * batches}',
            f'megaflux_rank_blocks_total{{{of},rank="1",placement="fixed"}} {(8 - fixed) * batches}',
            f'megaflux_rank_blocks_total{{{of},rank="0",placement="planned"}} {planned * batches}',
            f'megaflux_rank_blocks_total{{{of},rank="1",placement="planned"}} {(8 - planned) * batches}',
            f'megaflux_replicas_total{{{of},weights="resident"}} {3 * batches if fixed > 4 else 0}',
            f'megaflux_replicas_total{{{of},weights="copied"}} {batches if fixed > 4 else 0}',
            f"megaflux_replica_bytes_total{{{of}}} {1024 * batches if fixed > 4 else 0}",
            f'megaflux_plan_decisions_total{{{of},decision="replicated"}} {batches if fixed > 4 else 0}',
            f'megaflux_plan_decisions_total{{{of},decision="refused"}} {0 if fixed > 4 else batches}',
            f'megaflux_expert_rows_total{{{of},expert="7",home_rank="0"}} {fixed * batches}',
        ]
    for rank in ("0", "1"):
        of = f'{SERVER},rank="{rank}"'
        lines += [
            f"megaflux_build_info{{{of},{WORKER}}} 1.0",
            f"megaflux_last_report_timestamp_seconds{{{of}}} 1.0",
            f'megaflux_memory_bytes{{{of},use="replica_slots"}} 2097152',
            f'megaflux_wait_timeouts_total{{{of},phase="counts"}} 0',
            f"megaflux_planner_seconds_sum{{{of}}} {0.001 * batches}",
            f"megaflux_planner_seconds_count{{{of}}} {batches}",
            f"megaflux_layer_seconds_sum{{{of}}} {0.004 * batches}",
            f"megaflux_layer_seconds_count{{{of}}} {batches}",
            f'megaflux_layer_seconds_bucket{{{of},le="0.005"}} {batches}',
            f'megaflux_layer_seconds_bucket{{{of},le="+Inf"}} {batches}',
        ]
    lines += [
        f"megaflux_capture_records_total{{{SERVER}}} 5",
        f"megaflux_capture_tokens_total{{{SERVER}}} 100",
        f"megaflux_capture_bytes_total{{{SERVER}}} 4700",
        f'megaflux_capture_dropped_total{{{SERVER},reason="storage"}} 2',
    ]
    return "\n".join(lines) + "\n"


class Exporter(ThreadingHTTPServer):
    """Answers ``/metrics`` with ``text``."""

    daemon_threads = True
    text = metrics(100)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Exporter

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(self.server.text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    server = Exporter(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_figures_since_the_start_are_ratios_of_totals(exporter: Exporter) -> None:
    seen = figures(Change(None, scrape(metrics_url(exporter.address))))
    assert seen.seconds is None
    total = seen.total
    assert (total.batches, total.tokens) == (100, 1000)
    assert (total.fixed, total.planned, total.removed) == (10 / 8, 9 / 8, 0.5)
    assert (total.replicas, total.resident, total.refused, total.copied_bytes) == (2, 0.75, 0.5, 102400)
    assert [(layer.name, layer.fixed, layer.removed) for layer in seen.layers] == [("0", 1.5, 0.5), ("1", 1.0, None)]
    assert [(rank.rank, rank.fixed, rank.planned) for rank in seen.ranks] == [("0", 1.25, 1.125), ("1", 0.75, 0.875)]
    assert seen.ranks[0].layer_s == pytest.approx(0.004)
    assert seen.ranks[0].planner_share == pytest.approx(0.25)
    assert seen.ranks[0].layer_p99_s == pytest.approx(0.99 * 0.005)
    assert [(one.layer, one.expert, one.chosen_by) for one in seen.experts] == [("0", "7", 0.6), ("1", "7", 0.4)]
    assert seen.capture is not None
    assert (seen.capture.records, seen.capture.dropped) == (5, {"storage": 2})
    assert seen.timeouts == {}


def test_figures_between_two_looks_are_of_what_changed(exporter: Exporter) -> None:
    first = scrape(metrics_url(exporter.address))
    exporter.text = metrics(130)
    seen = figures(Change(first, scrape(metrics_url(exporter.address))))
    assert seen.seconds is not None
    assert (seen.total.batches, seen.total.tokens) == (30, 300)
    assert seen.total.fixed == 10 / 8
    exporter.text = metrics(4)  # started anew
    assert figures(Change(first, scrape(metrics_url(exporter.address)))).total.batches == 4
    exporter.text = metrics(100)  # nothing happened
    idle = figures(Change(first, scrape(metrics_url(exporter.address)))).total
    assert (idle.batches, idle.fixed, idle.removed, idle.refused) == (0, None, None, None)


def test_an_expert_that_has_become_hot_is_not_shown_with_rows_from_before_the_first_look(exporter: Exporter) -> None:
    first = scrape(metrics_url(exporter.address))
    hot = f'megaflux_expert_rows_total{{{SERVER},layer="0",expert="3",home_rank="0"}} '
    exporter.text = metrics(110) + hot + "700\n"
    second = scrape(metrics_url(exporter.address))
    experts = figures(Change(first, second)).experts
    assert [(one.layer, one.expert, one.chosen_by) for one in experts] == [("0", "7", 0.6), ("1", "7", 0.4)]
    exporter.text = metrics(120) + hot + "790\n"
    experts = figures(Change(second, scrape(metrics_url(exporter.address)))).experts
    assert [(one.expert, one.chosen_by) for one in experts] == [("3", 0.9), ("7", 0.6), ("7", 0.4)]


def test_once_prints_tables_and_names_faults(exporter: Exporter) -> None:
    done = CliRunner().invoke(app, ["top", exporter.address, "--once"], env={"COLUMNS": "120"})
    assert done.exit_code == 0
    for shown in ("tiny on vllm 0.27.1", "since the server started", "50.0 %", "1.125", "4 ms", "1.11x"):
        assert shown in done.output
    assert "silent for more than 30 s: ranks 0, 1" in done.output  # its last report is of 1970
    assert "requests whose routes were lost: 2 storage" in done.output
    assert "timed out" not in done.output


def test_a_small_terminal_shows_the_most_loaded_and_says_how_many_are_left_out(exporter: Exporter) -> None:
    seen = figures(Change(None, scrape(metrics_url(exporter.address))))
    rank, layer = seen.ranks[0], seen.layers[0]
    ranks = tuple(replace(rank, rank=str(i), planned=1 + i / 100, silent_s=1.0) for i in range(64))
    layers = tuple(replace(layer, name=f"layer-{i}") for i in range(61))
    console = Console(file=io.StringIO(), width=110)
    console.print(view("http://a/metrics", replace(seen, ranks=ranks, layers=layers), height=40))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) <= 40
    assert next(line.split()[0] for line in lines if "━" in line) == "63"
    assert len([line for line in lines if "more" in line]) == 2
    assert "layer-0" in "".join(lines)


def test_json_holds_every_figure(exporter: Exporter) -> None:
    done = CliRunner().invoke(app, ["top", exporter.address, "--json"])
    assert json.loads(done.output)["total"]["removed"] == 0.5


def test_the_live_view_waits_for_a_server_that_is_away(exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=110, height=40)
    url, texts = metrics_url(exporter.address), [metrics(150), "", metrics(160)]

    def next_text(_: float) -> None:
        if not texts:
            raise KeyboardInterrupt
        exporter.text = texts.pop(0)

    monkeypatch.setattr(command.time, "sleep", next_text)
    command.watch(console, url, scrape(url), 2.0)
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert "since the server started" in output
    assert "last " in output
    assert "shows no metrics of MegaFlux" in output


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("10.0.0.1:8000", "http://10.0.0.1:8000/metrics"),
        ("http://a:1", "http://a:1/metrics"),
        ("https://a/", "https://a/metrics"),
        ("http://a:1/v1", "http://a:1/metrics"),
        ("http://a:1/v1/", "http://a:1/metrics"),
        ("http://a:1/other/metrics", "http://a:1/other/metrics"),
    ],
)
def test_an_address_is_completed(address: str, url: str) -> None:
    assert metrics_url(address) == url


def test_other_servers_are_refused_in_one_line(exporter: Exporter) -> None:
    with pytest.raises(InputError, match="answers with status 404"):
        scrape(f"http://{exporter.address}/nothing")
    with pytest.raises(InputError, match="gives no metrics: URL can't contain control characters"):
        scrape(metrics_url("two words:1"))
    exporter.text = "up 1\n"
    with pytest.raises(InputError, match="shows no metrics of MegaFlux"):
        scrape(metrics_url(exporter.address))
    exporter.text = "<html>no metrics</html>"
    with pytest.raises(InputError, match="gives no metrics"):
        scrape(metrics_url(exporter.address))
    with pytest.raises(InputError, match="is no address"):
        scrape("file:///etc/passwd")
    done = CliRunner().invoke(app, ["top", "127.0.0.1:1", "--once"])
    assert done.exit_code == 2
    assert "gives no metrics: [Errno 111] Connection refused" in done.stderr
