"""Vision: image to features. `asv run -b "^vision"`"""

from vlmbench.suite import benchmark, setup_cache

__all__ = ["setup_cache"]

track_vision_seconds = benchmark("vision_seconds")
track_aten_ops_vision = benchmark("aten_ops.vision")
track_python_calls_vision = benchmark("python_calls.vision")
