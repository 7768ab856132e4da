"""SGLang with the backend on two CPU ranks: answers of a real model, and what replication did for them.

    .venv-sglang-0.5.17/bin/python examples/serve_sglang.py        in the environment of `make test-sglang`; 3 minutes

Uses SGLang's offline engine, as RL frameworks do; a server takes the same arguments as flags (docs/sglang.md). On GPUs
leave out ``ON_CPU``, and `SGLANG_PLATFORM` with it.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

MODEL = Path(__file__).resolve().parents[1] / "models" / "tiny-moe"
PROMPTS = [
    "def merge(left, right):\n    result = []",
    "The import statement combines two operations:",
    "12 + 30 =",
    "If a class defines a slot also defined in a base class,",
]
ON_CPU: dict[str, Any] = {"device": "cpu", "attention_backend": "torch_native", "dtype": "float32"}
ON_CPU |= {"mem_fraction_static": 0.6, "max_total_tokens": 4096}
BACKEND: dict[str, Any] = {"moe_a2a_backend": "megaflux", "moe_runner_backend": "megaflux", "tp_size": 2, "ep_size": 2}


def main() -> None:
    os.environ |= {"SGLANG_PLATFORM": "plain_cpu", "SGLANG_CPU_OMP_THREADS_BIND": "0|1", "OMP_NUM_THREADS": "1"}
    import sglang

    with tempfile.TemporaryDirectory() as folder:
        # Small blocks, so that the few rows of these prompts are worth moving.
        options = {"replica_slots": 3, "block_rows": 4, "plan_log": folder}
        engine = sglang.Engine(
            model_path=str(MODEL), json_model_override_args=json.dumps({"megaflux": options}), **BACKEND, **ON_CPU
        )
        answers = engine.generate(PROMPTS, {"temperature": 0, "max_new_tokens": 24})
        engine.shutdown()
        plans = [json.loads(line) for line in (Path(folder) / "plan.jsonl").read_text().splitlines()]

    for prompt, answer in zip(PROMPTS, answers, strict=True):
        print(f"{prompt!r}\n  {answer['text']!r}")
    fixed, planned = (sum(max(plan[loads]) for plan in plans) for loads in ("fixed_loads", "loads"))
    replicas, sent = (sum(plan[key] for plan in plans) for key in ("replicas", "transfers"))
    print(
        f"\n{len(plans)} batches of a layer: {replicas} replicas in use, weights copied {sent} times; the busiest rank "
        f"computed {planned} blocks instead of {fixed}"
    )


if __name__ == "__main__":
    main()
