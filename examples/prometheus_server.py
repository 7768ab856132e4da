"""A Prometheus of one's own on 127.0.0.1: started with a configuration, asked over HTTP, and always stopped.

Decides how the process lives and dies and how queries reach it. Knows no metric.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from examples.vllm_server import free_port

START_TIMEOUT_S, QUERY_TIMEOUT_S, STOP_TIMEOUT_S = 30.0, 30.0, 15.0


class PrometheusError(RuntimeError):
    """Prometheus did not start, did not answer, or refused a query."""


@dataclass(frozen=True)
class Series:
    """One time series of an answer.

    Attributes:
        labels: its labels, ``__name__`` among them where the query keeps it.
        times: seconds since the epoch.
        values: as many as times; NaN and infinities as Prometheus gives them.
    """

    labels: dict[str, str]
    times: tuple[float, ...]
    values: tuple[float, ...]


def prometheus_command() -> str:
    """The ``prometheus`` that is there.

    Raises:
        PrometheusError: there is none.
    """
    command = program("prometheus")
    if command is None:
        raise PrometheusError("no prometheus program; make prometheus fetches it where the distribution has one")
    return command


def program(name: str) -> str | None:
    """Path of ``prometheus`` or ``promtool``: what scripts/fetch_prometheus.py fetched, or the one on the PATH."""
    fetched = Path(sys.prefix) / "prometheus" / name
    return str(fetched) if fetched.exists() else shutil.which(name)


class Prometheus:
    """A running ``prometheus`` that scrapes what its configuration names.

    ::

        targets = {"megaflux-server": "127.0.0.1:8000", "megaflux-trainer": "127.0.0.1:9401"}
        with Prometheus(config_for(Path("dashboards/prometheus"), targets, 1), Path("out/prometheus")) as prometheus:
            print(prometheus.query("up"))

    Args:
        config: the configuration, as ``prometheus.yml`` would hold it; paths in it must be absolute.
        folder: for the configuration, the log and the data; made anew.
        port: to listen on at 127.0.0.1; None takes a free one.

    Raises:
        PrometheusError: there is no such program, or it did not start.
    """

    def __init__(self, config: dict[str, Any], folder: Path, port: int | None = None) -> None:
        command = prometheus_command()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.folder, self.url = folder, f"http://127.0.0.1:{port or free_port()}"
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.command = [command, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
        self.command += [f"--web.listen-address={self.url.removeprefix('http://')}", "--log.level=warn"]

    def __enter__(self) -> Prometheus:
        with (self.folder / "prometheus.log").open("wb") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, "GOMAXPROCS": "1"}
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def query(self, expression: str, at: float | None = None) -> list[Series]:
        """The instant vector (or the scalar, as one series without labels) of an expression.

        Raises:
            PrometheusError: the expression is wrong or the server is gone.
        """
        data = self.get("query", query=expression, time=time.time() if at is None else at)
        if data["resultType"] == "scalar":
            return [Series({}, (data["result"][0],), (float(data["result"][1]),))]
        return [Series(one["metric"], (one["value"][0],), (float(one["value"][1]),)) for one in data["result"]]

    def query_range(self, expression: str, start: float, end: float, step: float) -> list[Series]:
        """The values of an expression every ``step`` seconds from ``start`` to ``end``.

        Raises:
            PrometheusError: the expression is wrong or the server is gone.
        """
        data = self.get("query_range", query=expression, start=start, end=end, step=step)
        return [
            Series(one["metric"], tuple(t for t, _ in one["values"]), tuple(float(v) for _, v in one["values"]))
            for one in data["result"]
        ]

    def get(self, path: str, **arguments: Any) -> Any:
        """The ``data`` of ``/api/v1/<path>``.

        Raises:
            PrometheusError: with what Prometheus said.
        """
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(url, timeout=QUERY_TIMEOUT_S) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise PrometheusError(f"{arguments}: {json.load(error).get('error')}") from error
        except OSError as error:
            raise PrometheusError(f"{url}: {error}") from error

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5):
                    return
            except OSError:
                time.sleep(0.1)
        log = (self.folder / "prometheus.log").read_text(errors="replace")
        raise PrometheusError(f"prometheus did not start; its log ends:\n{log[-2000:]}")

    def _stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def config_for(folder: Path, targets: Mapping[str, str], interval_s: int) -> dict[str, Any]:
    """The project's own configuration, with other targets and at another pace.

    Args:
        folder: of ``prometheus.yml`` and its rule files.
        targets: ``host:port`` for the name of each job.
        interval_s: seconds between scrapes and between evaluations of the rules.
    """
    config: dict[str, Any] = yaml.safe_load((folder / "prometheus.yml").read_text())
    config["global"] |= {"scrape_interval": f"{interval_s}s", "evaluation_interval": f"{interval_s}s"}
    config["rule_files"] = [str(folder / name) for name in config["rule_files"]]
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": [targets[job["job_name"]]]}]
    return config
