"""Benchmarks. Each module that measures is run with `python -m benchmarks.<name>`.

- cpu: the CPU kernels beside plain torch; `make bench-cpu`
- cpu_limits: the CPU kernels by instruction set, beside a matrix product
- retrieval: what examples/train_retrieval.py reaches
- readme: writes the tables of README.md and docs/ from the stored results

The rest is shared: the batches that are measured (cases), the same attention in plain torch
(implementations), peak memory (memory), and records of results and tables of text (report).
"""
