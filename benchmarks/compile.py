"""Compile: the decode step's first calls, inductor cache cold and warm. `asv run -b "^compile"`"""

from vlmbench.suite import benchmark, setup_cache

__all__ = ["setup_cache"]

track_compile_cold_seconds = benchmark("compile_cold_seconds", compiling_only=True)
track_compile_warm_seconds = benchmark("compile_warm_seconds", compiling_only=True)
