"""Keys of other asynchronous systems take effect, with a note that names the key here."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.configs.rules import check
from tests.configs.samples import RLVR, refusal, rlvr, write

FULLY_ASYNC = """
async_generation_ratio: 2
async_training:
  staleness_threshold: 1
  max_staleness_allowed: 3
  max_queue_size: 2000
  min_batch_count: 2
  batch_timeout: 11
  batch_deadline: 600
  generation_timeout: 12
  batch_generation_interval: 0.1
  max_sync_retries: 4
  sync_timeout: 13
  sync_retry_delay: 0.5
"""


def test_the_block_of_a_fully_asynchronous_system_takes_effect(tmp_path: Path) -> None:
    config = rlvr(tmp_path, text=RLVR + FULLY_ASYNC)
    asynchronous = config.async_training
    assert (asynchronous.batch_timeout_s, asynchronous.batch_deadline_s) == (11, 600)
    assert asynchronous.batch_generation_interval_s == 0.1
    assert (asynchronous.staleness_threshold, asynchronous.max_staleness_allowed) == (1, 3)
    assert (asynchronous.max_queue_size, asynchronous.min_batch_count) == (2000, 2)
    assert config.actor_infer.generation_timeout_s == 12
    assert (config.max_sync_retries, config.sync_timeout_s, config.sync_retry_delay_s) == (4, 13, 0.5)
    message = [str(warning) for warning in check(config).warnings]
    assert "async_training.generation_timeout: is read as actor_infer.generation_timeout_s" in message
    assert "async_training.max_sync_retries: is read as max_sync_retries" in message
    assert "async_training.sync_timeout: is read as sync_timeout_s" in message
    assert "async_training.sync_retry_delay: is read as sync_retry_delay_s" in message
    assert not [note for note in message if "no effect" in note]


OFF_POLICY = """
rollout_gpu_ids: [16, 17]
train_gpu_ids: 0-15
buffer_size: 2
max_staleness: 4
importance_sampling: true
is_clip_range: [0.5, 2.0]
exp_name: lead-${buffer_size}
"""


def test_the_keys_of_an_off_policy_buffer_take_effect(tmp_path: Path) -> None:
    text = RLVR.replace("  device_mapping: 0-15\n", "").replace("actor_infer:\n  device_mapping: 16-23\n", "")
    config = rlvr(tmp_path, text=text + OFF_POLICY)
    assert config.actor_infer.device_mapping == [16, 17]
    assert config.actor_train.device_mapping == list(range(16))
    assert (config.async_generation_ratio, config.async_training.max_staleness_allowed) == (2, 4)
    assert (config.correction.weights.lower, config.correction.weights.upper) == (0.5, 2.0)
    assert config.exp_name == "lead-2"
    message = [str(warning) for warning in check(config).warnings]
    for note in (
        "rollout_gpu_ids: is read as actor_infer.device_mapping",
        "train_gpu_ids: is read as actor_train.device_mapping",
        "buffer_size: is read as async_generation_ratio",
        "max_staleness: is read as async_training.max_staleness_allowed",
    ):
        assert note in message


@pytest.mark.parametrize(("value", "source"), [("true", "behavior"), ("false", "recompute")])
def test_bypass_mode_is_read(tmp_path: Path, value: str, source: str) -> None:
    config = rlvr(tmp_path, f"bypass_mode={value}")
    assert config.old_log_probs_source == source
    assert ("bypass_mode", f"{value} is read as old_log_probs_source: {source}") in config.source.notes


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("calculate_log_probs=true", "calculate_log_probs: has no effect: engines always return log-probs"),
        ("actor_infer.calculate_log_probs=true", "actor_infer.calculate_log_probs: has no effect"),
        ("free_cache_engine=false", "free_cache_engine: has no effect: engines keep their memory between steps"),
    ],
)
def test_keys_that_describe_the_default_are_warnings(tmp_path: Path, override: str, message: str) -> None:
    notes = [f"{path}: {message}" for path, message in rlvr(tmp_path, override).source.notes]
    assert any(note.startswith(message) for note in notes), notes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("calculate_log_probs: false", "calculate_log_probs: False is not available: engines always return log-probs"),
        ("free_cache_engine: true", "free_cache_engine: True is not available: engines keep their memory"),
        ("bypass_mode: auto", "bypass_mode: 'auto' is not true or false"),
        ("bypass_mode: true\nold_log_probs_source: recompute", "bypass_mode: is another spelling of old_log_probs"),
        ("buffer_size: 1\nasync_generation_ratio: 2", "buffer_size: is another spelling of async_generation_ratio"),
        ("rollout_gpu_ids: [1]", "rollout_gpu_ids: is another spelling of actor_infer.device_mapping, which is"),
        ("buffer_size: 2\nmax_staleness: 1", "max_staleness_allowed: 1 would drop samples"),
        (
            "sync_timeout: 5\nasync_training: {sync_timeout: 6}",
            "async_training.sync_timeout: is another spelling of sync_timeout_s, which is given too; keep one",
        ),
        ("async_training: {sync_timeout_s: 5}", "async_training.sync_timeout_s: unknown key"),
        ("async_training: {generation_timeout: 0}", "actor_infer.generation_timeout_s: 0.0 is too small"),
    ],
)
def test_contradicting_spellings_are_refused(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(tmp_path, text=RLVR + text + "\n")


def test_an_override_wins_in_any_spelling(tmp_path: Path) -> None:
    text = RLVR + "buffer_size: 2\nasync_training: {sync_timeout: 5}\n"
    config = rlvr(tmp_path, "async_generation_ratio=0.5", "sync_timeout_s=7", text=text)
    assert (config.async_generation_ratio, config.sync_timeout_s) == (0.5, 7)
    assert rlvr(tmp_path, "buffer_size=1", text=RLVR + "async_generation_ratio: 3\n").async_generation_ratio == 1


def test_a_base_file_may_use_another_spelling(tmp_path: Path) -> None:
    write(tmp_path, RLVR + "buffer_size: 2\n", "base.yaml")
    assert rlvr(tmp_path, text="defaults: base\nasync_generation_ratio: 1\n").async_generation_ratio == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("rollout_gpu_ids=16-23 actor_infer=5", "actor_infer: 5 is not a section"),
        ("async_training.generation_timeout=5 actor_infer=5", "actor_infer: 5 is not a section"),
        ("importance_sampling=true correction=strong", "correction: 'strong' is not a section"),
        ("importance_sampling=true correction=[weights]", "correction: ['weights'] is not a section"),
    ],
)
def test_value_in_place_of_a_section_is_reported(tmp_path: Path, overrides: str, message: str) -> None:
    assert message in refusal(tmp_path, *overrides.split())
