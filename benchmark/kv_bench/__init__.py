"""The parts of bench_kv_copy.py."""
