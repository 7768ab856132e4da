"""Benchmarks of vLLM on two GPUs: the same requests, weights and routes for stock vLLM and for every variant of ours.

* ``models``: shapes, written as checkpoints without weights.
* ``routes``: a real routing trace as a table from token id to experts.
* ``worker``, ``scheduler``: what runs inside vLLM's processes: random weights, forced routes, the budget of a step.
* ``backends``: the engines that are compared, as vLLM's arguments.
* ``engine``: one engine in a process of its own; ``fleet``: several, asked in turn.
* ``prefill``, ``decode``, ``agreement``, ``soak``: one measurement each; ``bench_serving.py`` runs them.

``docs/serving-benchmarks.md`` says what is measured and how.
"""
