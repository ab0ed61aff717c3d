"""Benchmarks. Each module that measures is run with `python -m benchmarks.<name>`.

- attention: the kernels for GPUs against Triton and softmax attention; `make bench-gpu`
- paged: attention over a paged KV cache, and with `--stack` a stack of layers (stack)
- layer: a whole layer on a GPU, fused and composed, and what its kernels take
- training_step: what attention takes of a training step of the retrieval example, on a GPU
- train: training steps of the ranking example on several GPUs
- context: context parallel attention over several GPUs
- cpu: the CPU kernels against plain torch; `make bench-cpu`
- cpu_limits: the CPU kernels by instruction set, against a matrix product
- engine: the inference engine under load; serving: examples/serve.py under load, over loopback
- retrieval, ranking: what the examples that train reach
- published: what the recipes of the retrieval example reach, beside published results
- report: writes the tables of README.md and docs/ from stored results; plots: draws them

They share the command line (cli), the runner (runner), the timing loop (timing), records (record)
and tables of them (tables). `--against DIR` times the library of another checkout by turns with
this one (against). Beneath are the batches that are measured (cases, paged_cases), implementations
with their baselines, time on a GPU (gpu), profiles (profile), ranks, load and peak memory (memory).
"""
