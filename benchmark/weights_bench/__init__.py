"""The parts of bench_weights.py."""
