"""Keys of asynchronous systems: the block `async_training` of one, and the buffer of an off-policy trainer."""

from __future__ import annotations

RENAMED_KEYS = {
    "sync_timeout": "sync_timeout_s",
    "sync_retry_delay": "sync_retry_delay_s",
    "generation_timeout": "generation_timeout_s",
    "batch_timeout": "batch_timeout_s",
    "batch_deadline": "batch_deadline_s",
    "batch_generation_interval": "batch_generation_interval_s",
}

MOVED_KEYS = {
    "async_training.generation_timeout": "actor_infer.generation_timeout_s",
    "async_training.max_sync_retries": "max_sync_retries",
    "async_training.sync_timeout": "sync_timeout_s",
    "async_training.sync_retry_delay": "sync_retry_delay_s",
    "rollout_gpu_ids": "actor_infer.device_mapping",
    "train_gpu_ids": "actor_train.device_mapping",
    "buffer_size": "async_generation_ratio",
    "max_staleness": "async_training.max_staleness_allowed",
}

WEIGHT_SWITCH, WEIGHT_RANGE = "importance_sampling", "is_clip_range"
"""`importance_sampling: true` with `is_clip_range: [lower, upper]` is read as clamped token weights."""
