"""Graphs: what Dynamo captured, by phase; the same on every run. `asv run -b "^graph"`"""

from vlmbench.suite import benchmark, setup_cache

__all__ = ["setup_cache"]

track_graphs_prefill = benchmark("graphs.prefill", compiling_only=True)
track_graphs_decode = benchmark("graphs.decode", compiling_only=True)
track_graphs_generate = benchmark("graphs.generate", compiling_only=True)
track_graph_breaks_prefill = benchmark("graph_breaks.prefill", compiling_only=True)
track_graph_breaks_decode = benchmark("graph_breaks.decode", compiling_only=True)
track_graph_breaks_generate = benchmark("graph_breaks.generate", compiling_only=True)
track_recompiles_prefill = benchmark("recompiles.prefill", compiling_only=True)
track_recompiles_decode = benchmark("recompiles.decode", compiling_only=True)
track_recompiles_generate = benchmark("recompiles.generate", compiling_only=True)
track_captured_ops_prefill = benchmark("captured_ops.prefill", compiling_only=True)
track_captured_ops_decode = benchmark("captured_ops.decode", compiling_only=True)
track_captured_ops_generate = benchmark("captured_ops.generate", compiling_only=True)
track_guards_prefill = benchmark("guards.prefill", compiling_only=True)
track_guards_decode = benchmark("guards.decode", compiling_only=True)
track_guards_generate = benchmark("guards.generate", compiling_only=True)
