"""Workers on Ray: who owns which device, how a call reaches every rank, what travels, and how weights are published.

Imports from configs, algorithms, datasets, rollout, platforms and models; pipelines are built on it. The modules here
import ray, and torch where tensors are; engines are imported by the strategies only, in the worker's own process.
"""
