"""How trained weights reach the engines.

One weight update, in order:

1. `roll/pipeline/run.py`: `TrainingLoop._update_weights` calls the synchronizer before the first step and
   after each.
2. `synchronizer.py`: `WeightSynchronizer.update_weights` runs the update from the driver. `_attempt` has its steps:
   connect, pause, begin, transfer, end, flush, verify, commit, resume. A `Transport` sends the weights:
   one of the files `broadcast.py` and `shared_memory.py`.
3. `plan.py`: which tensors a stage sends (`WeightSpec`), the buckets they are sent in, and the checks of both.
4. `roll/distributed/process_groups.py`: the broadcast groups, joined by `WeightSender.join_broadcast_group` and
   `WeightReceiver.join_broadcast_groups`. On a CPU training ranks open the memory of `shm_buckets.py` instead.
5. `train/weight_sender.py`: the remote methods of a training rank. It takes the tensors, under their HF names, from
   `roll/distributed/train/megatron_weights.py`, which renames and merges Megatron's parameters by the rules of
   `roll/models/families/weights.py`, and broadcasts them or writes them to shared memory.
6. `infer/weight_receiver.py`: the remote methods of an engine. It passes each bucket to SGLang, whose `load_weights` of
   the model copies the tensors into the engine's parameters. A patch in `roll/platforms/cpu/sglang_platform.py` makes
   SGLang read the CPU memory of `shm_buckets.py`.
7. `roll/distributed/infer/sglang_checksums.py`: the checksums that the sender expects an engine to report; the
   synchronizer compares both before it commits.

With `weight_update: delta` step 2 is done by `delta_updates.py`: `delta_sender.py` compares the weights with those of
the last update, and `delta.py` writes what has changed into the engine's parameters, in the engine's process.
`adapters.py` sends adapters of low rank instead: step 2 has no session then, and `engine_adapters.py` loads them.
`report.py` has what an update returns to the training loop.
"""
