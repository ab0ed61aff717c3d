"""Benchmarks. Each module that measures is run with `python -m benchmarks.<name>`.

cpu               the CPU kernels beside plain torch; `make bench-cpu`
readme            writes the tables of README.md from the stored results
cases             the batches that are measured
implementations   the same attention in plain torch: what the kernels are compared with
memory            peak memory of a call, from the resident set of a process
report            records of results, and tables
"""
