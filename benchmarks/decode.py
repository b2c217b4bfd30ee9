"""Decode: token by token. `asv run -b "^decode.*static"`"""

from vlmbench.suite import benchmark, setup_cache

__all__ = ["setup_cache"]

track_decode_seconds_per_token = benchmark("decode_seconds_per_token")
track_decode_seconds_p99 = benchmark("decode_seconds_p99")
track_aten_ops_per_token = benchmark("aten_ops_per_token")
track_python_calls_per_token = benchmark("python_calls_per_token")
track_allocations_per_token = benchmark("allocations_per_token")
