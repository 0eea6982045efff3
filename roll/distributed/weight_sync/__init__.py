"""How trained weights reach the engines.

`synchronizer` drives a weight update from the driver; `sender` is its training side, `receiver` its engine side. `plan`
divides tensors into buckets, `shm_buckets` holds buckets in memory that processes of one node share.
"""
