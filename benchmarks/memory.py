"""Memory: the cache, the peak of a phase, what stays behind. `asv run -b "^memory"`"""

from vlmbench.suite import benchmark, setup_cache

__all__ = ["setup_cache"]

track_cache_bytes = benchmark("cache_bytes")
track_peak_bytes_prefill = benchmark("peak_bytes.prefill")
track_peak_bytes_decode = benchmark("peak_bytes.decode")
track_peak_bytes_generate = benchmark("peak_bytes.generate")
track_retained_bytes = benchmark("retained_bytes")
track_rss_bytes = benchmark("rss_bytes")
