"""Benchmarks. Each module that measures is run with `python -m benchmarks.<name>`.

- cpu: the CPU kernels beside plain torch; `make bench-cpu`
- cpu_limits: the CPU kernels by instruction set, beside a matrix product
- attention: the kernels for GPUs beside Triton and softmax attention; `make bench-gpu`
- layer: a whole layer on a GPU, fused and composed, and what its kernels take
- training_step: attention's share of a training step of the example, on a GPU
- plots: draws stored results of attention
- retrieval: what examples/train_retrieval.py reaches
- ranking: what examples/train_ranking.py reaches
- serving: examples/serve.py under load, over loopback
- readme: writes the tables of README.md and docs/ from the stored results

The rest is shared: the batches that are measured (cases, for GPUs workloads), the same attention in
plain torch (implementations) and what GPUs are measured with (columns, of which triton_hstu is our
baseline in Triton), peak memory (memory), time on a GPU (gpu), and records of results and tables of
text (report).
"""
