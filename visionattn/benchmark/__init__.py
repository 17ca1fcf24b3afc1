"""Benchmarks: the operations and the models against what a user would otherwise take. ``tools/benchmark.py`` is the command."""
