"""Benchmarks. Each module that measures is run with `python -m benchmarks.<name>`.

- attention: the kernels for GPUs against Triton and softmax attention; `make bench-gpu`
- paged: attention over a paged KV cache, and with `--stack` a stack of layers (stack)
- layer: a whole layer on a GPU, fused and composed, and the time of each of its kernels
- training_step: attention's part of a training step of the retrieval example, on a GPU
- train: training steps of the ranking example on several GPUs
- context: context parallel attention over several GPUs
- cpu: the CPU kernels against plain torch; `make bench-cpu`
- cpu_limits: the CPU kernels by instruction set, against a matrix product
- engine: the inference engine under load; serving: examples/serve.py under load, over loopback
- retrieval, ranking: the metrics that the training examples reach
- published: the metrics of the retrieval example's recipes, beside published results
- report: writes the tables of README.md and docs/ from stored results; plots: draws them

They share the command line (cli), the runner (runner), the timing loop (timing), records (record)
and their tables (tables). `--against DIR` times the library of another checkout alternately with
this one (against). Helper modules: the measured batches (cases, paged_cases), implementations and
baselines, GPU timing (gpu), profiles (profile), ranks, load generators (load) and peak memory
(memory).
"""
