"""Workers on Ray: devices and processes of each role, remote calls and the data they carry, engines, weight updates.

Imports from configs, algorithms, datasets, rollout, platforms and models; pipelines are built on it. Megatron and
SGLang are imported in worker processes only: by modules of `strategy`, which `TrainWorker` and `InferWorker` load.
"""
