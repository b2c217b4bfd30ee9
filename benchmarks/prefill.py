"""Prefill: the prompt with its images to the first token. `asv run -b "^prefill"`"""

from vlmbench.suite import benchmark, setup_cache

__all__ = ["setup_cache"]

track_prefill_seconds = benchmark("prefill_seconds")
track_prefill_seconds_per_token = benchmark("prefill_seconds_per_token")
track_aten_ops_prefill = benchmark("aten_ops.prefill")
track_python_calls_prefill = benchmark("python_calls.prefill")
