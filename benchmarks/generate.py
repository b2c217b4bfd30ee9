"""Generate: what users call, and the first three requests of a fresh process. `asv run -b "^generate"`"""

from vlmbench.suite import benchmark, setup_cache

__all__ = ["setup_cache"]

track_generate_seconds = benchmark("generate_seconds")
track_first_request_seconds = benchmark("first_request_seconds")
track_second_request_seconds = benchmark("second_request_seconds")
track_third_request_seconds = benchmark("third_request_seconds")
