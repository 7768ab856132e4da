"""Benchmarks: run one as ``python -m benchmarks.bench_<stem>`` from the root of the repository."""
