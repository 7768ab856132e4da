"""The demonstration's parts that need no engine: a server's life, with a small stand-in for vLLM, and the plan log."""

import json
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from examples import serve_demo, vllm_server
from megaflux_serve.cli.summary import BatchOutcome, accumulate

STAND_IN = '''#!{python}
"""Answers as ``vllm serve`` does; a child process ignores SIGTERM, as an engine that hangs would."""
import json, subprocess, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

sleeper = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", sleeper], stdout=subprocess.PIPE)
child.stdout.readline()
print("Starting to load model; child", child.pid, flush=True)
if "--fail" in sys.argv:
    print("INFO nothing to see\\nValueError: replica_slots = 99 is not allowed\\nINFO bye: no error", flush=True)
    sys.exit(7)

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        bad = asked["prompt"] == "bad"
        self.send_response(400 if bad else 200)
        self.end_headers()
        answer = {{"choices": [{{"text": asked["prompt"][::-1], "token_ids": [len(asked["prompt"])]}}]}}
        self.wfile.write(b"no such prompt" if bad else json.dumps(answer).encode())

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
'''


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    command = tmp_path / "vllm"
    command.write_text(STAND_IN.format(python=sys.executable))
    command.chmod(0o755)
    monkeypatch.setattr(vllm_server, "vllm_command", lambda: str(command))
    monkeypatch.setattr(vllm_server, "STOP_TIMEOUT_S", 0.5)
    return tmp_path


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie that nobody has collected yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def child_of(server: vllm_server.Server) -> int:
    return int(re.findall(r"child (\d+)", server.log.read_text())[0])


def test_a_server_is_watched_answers_in_order_and_leaves_no_process(stand_in: Path) -> None:
    milestones: list[str] = []
    answered: list[None] = []
    with vllm_server.Server("tested", stand_in, [], stand_in / "out" / "log") as server:
        assert server.wait_until_ready(milestones.append) < 30
        answers = server.complete(["abc", "de", "f"], 1, lambda: answered.append(None))
        child = child_of(server)
        assert is_running(child)
    assert [(answer.text, answer.token_ids) for answer in answers] == [("cba", (3,)), ("ed", (2,)), ("f", (1,))]
    assert len(answered) == 3
    assert milestones[-1] == "loading weights"
    assert not is_running(child)


def test_a_server_that_ends_early_is_reported_with_its_log_and_its_last_errors(stand_in: Path) -> None:
    log = stand_in / "log"
    with (
        pytest.raises(vllm_server.ServerError) as caught,
        vllm_server.Server("bad", stand_in, ["--fail"], log) as server,
    ):
        server.wait_until_ready(lambda milestone: None)
    lines = str(caught.value).splitlines()
    assert lines == [
        f"the bad server ended with status 7 while it started; its log is {log}:",
        "  ValueError: replica_slots = 99 is not allowed",
    ]
    assert not is_running(child_of(server))


def interrupt(server: vllm_server.Server) -> None:
    """What Ctrl-C raises in the middle of the demonstration."""
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("accident", "error"),
    [
        (lambda server: server.complete(["bad"], 1, lambda: None), "refused a prompt: no such prompt"),
        (interrupt, "^$"),
    ],
    ids=["a refused prompt", "an interrupt"],
)
def test_the_server_is_stopped_whatever_happens(
    accident: Callable[[vllm_server.Server], object], error: str, stand_in: Path
) -> None:
    server = vllm_server.Server("tested", stand_in, [], stand_in / "log")

    def use() -> None:
        with server:
            server.wait_until_ready(lambda milestone: None)
            accident(server)

    with pytest.raises((vllm_server.ServerError, KeyboardInterrupt), match=error):
        use()
    assert not is_running(child_of(server))


def test_a_server_on_a_taken_port_is_refused_before_anything_is_removed(stand_in: Path) -> None:
    (stand_in / "plan.jsonl").write_text("of the server that runs")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(vllm_server.ServerError, match=f"port {port} of 127.0.0.1 cannot be used .*; --port takes"):
            serve_demo.megaflux_server(port, stand_in)
    assert (stand_in / "plan.jsonl").exists()
    assert serve_demo.megaflux_server(port, stand_in).port == port
    assert not (stand_in / "plan.jsonl").exists()


def test_without_vllm_the_demonstration_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(vllm_server.ServerError, match=r"no vllm command beside .* make install"):
        vllm_server.vllm_command()


def test_only_batches_after_the_start_are_read_from_the_plan_log(tmp_path: Path) -> None:
    record = {
        "layer": "model.layers.3.mlp.experts",
        "step": 0,
        "tokens": 6,
        "kappa": 2.0,
        "fixed_loads": [4, 2],
        "loads": [3, 3],
        "replicas": 1,
        "blocks_moved": 1,
        "transfers": 1,
        "gated": False,
    }
    log = tmp_path / "plan.jsonl"
    log.write_text(json.dumps(record | {"kappa": 9.0}) + "\n")
    reader = serve_demo.PlanReader(log)
    assert reader.read() == {}
    with log.open("a") as file:
        file.write(json.dumps(record) + "\n")
    assert reader.read() == {"3": [BatchOutcome(2.0, (4, 2), (3, 3), 1, 1, 1, 4, 3, False)]}
    assert reader.read() == {}


def test_batches_of_different_sizes_are_weighed_by_their_work() -> None:
    large = BatchOutcome(2.0, (80, 20), (60, 40), replicas=2, blocks_moved=20, transfers=1, fixed_time=80, time=60)
    small = BatchOutcome(1.0, (0, 2), (1, 1), replicas=1, blocks_moved=1, transfers=0, fixed_time=2, time=1)
    both = accumulate("0", [large, small])
    assert (both.fixed_loads, both.loads) == ((80, 22), (61, 41))
    assert both.kappa == (2.0 * 100 + 1.0 * 2) / 102
    assert both.max_over_mean_before == (80 + 2) / 51
    assert both.max_over_mean_after == (60 + 1) / 51
    assert both.eta == (82 - 61) / (82 - 51)
    assert both.speedup == 82 / 61
    assert (both.replicas, both.blocks_moved, both.transfers, both.num_batches) == (3, 21, 1, 2)
