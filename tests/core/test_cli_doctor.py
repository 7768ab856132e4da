"""``megaflux doctor``: every verdict follows from the facts, and says what to do."""

import json
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
from megaflux_kernels import language
from typer.testing import CliRunner

from megaflux_serve.cli import app, doctor, machine, verdicts
from megaflux_serve.cli.machine import Gpu, Machine
from megaflux_serve.cli.verdicts import Verdict, judge_engines, judge_executors

H200 = Gpu("NVIDIA H200", (9, 0), 140.0)
CPU_BOX = Machine(
    python="3.11.7",
    system="Linux x86_64",
    cpu_cores=2,
    memory_gib=24.0,
    memory_free_gib=16.0,
    disk_free_gib=70.0,
    versions={"torch": "2.13.0+cpu", "vllm": "0.27.1+cpu", "sglang": None, "nvidia-cutlass-dsl": "4.8.1"},
    torch_error=None,
    has_distributed=True,
    gpus=(),
    peer_access=None,
    plugins=("vllm",),
)
GPU_BOX = replace(CPU_BOX, gpus=(H200, H200), peer_access=True)
BARE = replace(CPU_BOX, versions=dict.fromkeys(CPU_BOX.versions), has_distributed=False, plugins=())


def with_version(package: str, version: str | None, box: Machine = CPU_BOX) -> Machine:
    return replace(box, versions={**box.versions, package: version})


def verdict(subject: str, box: Machine) -> Verdict:
    (found,) = [v for v in judge_executors(box) + judge_engines(box) if v.subject == subject]
    return found


def test_a_cpu_machine_runs_everything_but_the_megakernel() -> None:
    assert {v.subject: v.can_run for v in judge_executors(CPU_BOX)} == {
        "reference": True,
        "staged": True,
        "megakernel": False,
    }
    assert verdict("vLLM", CPU_BOX) == Verdict(
        "vLLM", True, "vllm 0.27.1+cpu with the plugin; executors: reference, staged"
    )


def test_two_joined_hopper_gpus_run_the_megakernel() -> None:
    expected = Verdict("megakernel", True, "2 x NVIDIA H200, nvidia-cutlass-dsl 4.8.1")
    assert verdict("megakernel", GPU_BOX) == expected


REFUSALS = {
    "no torch": ("reference", BARE, "torch is not installed", "install torch, or an engine, which brings it"),
    "broken torch": (
        "staged",
        replace(CPU_BOX, torch_error="libcudart.so.13: cannot open shared object file"),
        "torch does not load: libcudart.so.13: cannot open shared object file",
        "reinstall torch",
    ),
    "no distributed": (
        "staged",
        replace(CPU_BOX, has_distributed=False),
        "this torch was built without torch.distributed",
        "install a full torch build",
    ),
    "no gpu": (
        "megakernel",
        CPU_BOX,
        "torch sees no NVIDIA GPU",
        "use a machine with H100 or H200 GPUs and a CUDA build of torch",
    ),
    "old gpu": (
        "megakernel",
        replace(GPU_BOX, gpus=(H200, Gpu("NVIDIA A100", (8, 0), 80.0))),
        "NVIDIA A100 has compute capability 8.0, not 9.0",
        "use H100 or H200 GPUs",
    ),
    "gpus apart": (
        "megakernel",
        replace(GPU_BOX, peer_access=False),
        "the GPUs cannot reach each other's memory",
        "use GPUs joined by NVLink",
    ),
    "no kernel language": (
        "megakernel",
        with_version("nvidia-cutlass-dsl", None, GPU_BOX),
        "nvidia-cutlass-dsl is not installed",
        "pip install 'nvidia-cutlass-dsl[cu13]==4.8.1'",
    ),
    "another kernel language": (
        "megakernel",
        with_version("nvidia-cutlass-dsl", "4.9.0", GPU_BOX),
        "nvidia-cutlass-dsl is 4.9.0, not 4.8.0 or 4.8.1",
        "pip install 'nvidia-cutlass-dsl[cu13]==4.8.1'",
    ),
    "no kernel language and no gpu": (
        "megakernel",
        with_version("nvidia-cutlass-dsl", None),
        "torch sees no NVIDIA GPU; nvidia-cutlass-dsl is not installed",
        "use a machine with H100 or H200 GPUs and a CUDA build of torch; pip install 'nvidia-cutlass-dsl[cu13]==4.8.1'",
    ),
    "no engine": ("SGLang", CPU_BOX, "sglang is not installed", "in a checkout: pip install -e '.[sglang]'"),
    "old engine": (
        "vLLM",
        with_version("vllm", "0.25.3"),
        "vllm 0.25.3 is outside 0.26 up to before 0.34",
        "in a checkout: pip install -e '.[vllm]'",
    ),
    "new engine": (
        "vLLM",
        with_version("vllm", "0.34.0rc1"),
        "vllm 0.34.0rc1 is outside 0.26 up to before 0.34",
        "in a checkout: pip install -e '.[vllm]'",
    ),
    "no plugin": (
        "vLLM",
        replace(CPU_BOX, plugins=()),
        "vllm 0.27.1+cpu, but no entry point megaflux in vllm.general_plugins",
        "install a megaflux-serve that has this plugin into this environment",
    ),
    "no executor": (
        "vLLM",
        replace(CPU_BOX, torch_error="broken"),
        "vllm 0.27.1+cpu with the plugin, but no executor can run",
        "see the executors",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_run_says_why_and_what_to_do(case: str) -> None:
    subject, box, reason, remedy = REFUSALS[case]
    assert verdict(subject, box) == Verdict(subject, False, reason, remedy)


@pytest.mark.parametrize(("box", "status"), [(CPU_BOX, 0), (GPU_BOX, 0), (BARE, 1)])
def test_the_status_says_whether_any_executor_can_run(
    box: Machine, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "probe_machine", lambda: box)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == status
    assert "Traceback" not in result.output
    for word in ("reference", "staged", "megakernel", "vLLM", "SGLang"):
        assert word in result.stdout
    found = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert found["machine"]["gpus"] == [{"name": g.name, "capability": [9, 0], "memory_gib": 140.0} for g in box.gpus]
    assert [v["can_run"] for v in found["executors"]] == [v.can_run for v in judge_executors(box)]


def test_notes_warn_of_a_full_disk_little_memory_and_an_untested_python() -> None:
    assert verdicts.notes(CPU_BOX) == []
    tight = verdicts.notes(replace(CPU_BOX, python="3.14.0", disk_free_gib=1.0, memory_free_gib=2.0))
    assert [note.split(";")[0] for note in tight] == [
        "Python 3.14.0 was never tested",
        "1.0 GiB of disk are free here",
        "2.0 GiB of memory are free",
    ]


def test_this_machine_can_be_probed() -> None:
    found = machine.probe_machine()
    assert found.python == ".".join(map(str, sys.version_info[:3]))
    assert 0 < found.memory_free_gib <= found.memory_gib
    assert found.cpu_cores >= 1


def test_gpus_and_their_peer_access_come_from_torch() -> None:
    cuda = types.SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        get_device_properties=lambda device: types.SimpleNamespace(
            name=f"GPU {device}", major=9, minor=0, total_memory=8 * 2**30
        ),
        can_device_access_peer=lambda a, b: a < b,
    )
    gpus = (Gpu("GPU 0", (9, 0), 8.0), Gpu("GPU 1", (9, 0), 8.0))
    assert machine.probe_gpus(types.SimpleNamespace(cuda=cuda)) == (gpus, False)
    assert machine.probe_gpus(None) == ((), None)


def test_a_torch_that_does_not_load_is_a_fact_and_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise OSError("libtorch.so: undefined symbol\nsecond line")

    monkeypatch.setattr(machine.importlib, "import_module", broken)
    assert machine.import_torch() == (None, "libtorch.so: undefined symbol")


def test_version_ranges_are_those_of_the_project_file() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for engine, (first, beyond) in verdicts.ENGINE_VERSIONS.items():
        assert f'"{engine}>={first},<{beyond}"' in project
    assert '"{}[cu13]>={},<={}"'.format(language.DISTRIBUTION, *language.RELEASES) in project
    assert f'"{language.DISTRIBUTION}=={language.RELEASES[-1]}"' in project  # what the tests compile with
    assert 'requires-python = ">={},<{}"'.format(*verdicts.PYTHON_VERSIONS) in project


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError("libcudart.so.13: cannot open\nsecond line"), "libcudart.so.13: cannot open"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_a_torch_that_does_not_load_is_told_in_one_line(
    error: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr(machine.importlib, "import_module", fail)
    assert machine.import_torch() == (None, told)
