"""Workers on Ray: devices and processes of each role, remote calls and the data they carry, engines, weight updates.

Pipelines are built on it. Megatron and SGLang are imported in worker processes only: by modules of `train` and `infer`,
which `TrainWorker` and `InferWorker` load.
"""
