"""Keys of other asynchronous systems take effect, with a note that names the key here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll.configs.parallel_layout import spans
from roll.configs.rules import check
from tests.configs.samples import AGENTIC, RLVR, agentic, refusal, rlvr, write

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


def test_options_of_the_users_environment_keep_their_spelling(tmp_path: Path) -> None:
    given = {"rpc_timeout": 3, "template": "base", "top_k": -1, "gpus": "${num_gpus_per_node}"}
    text = AGENTIC.replace("env_type: frozen_lake", "env_type: mine:Env")
    text = text.replace("{size: 4, is_slippery: false}", json.dumps(given))
    config = agentic(tmp_path, "num_gpus_per_node=8", text=text)
    assert config.custom_envs["Lake"].env_config == {**given, "gpus": 8, "max_steps": 6}


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


PUBLISHED = """
trainer:
  type: async
  async:
    buffer_size: 2
    max_staleness: 1
    importance_sampling: true
    is_clip_range: [0.5, 2.0]
    rollout_gpu_ids: [16, 17]
    train_gpu_ids: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
exp_name: lead-${trainer.async.buffer_size}
"""

WITHOUT_DEVICES = RLVR.replace("  device_mapping: 0-15\n", "").replace("actor_infer:\n  device_mapping: 16-23\n", "")


def test_the_nested_block_of_an_off_policy_trainer_loads_and_admission_obeys_the_smaller_bound(tmp_path: Path) -> None:
    config = rlvr(tmp_path, text=WITHOUT_DEVICES + PUBLISHED)
    assert config.actor_infer.device_mapping == [16, 17]
    assert config.actor_train.device_mapping == list(range(16))
    assert (config.async_generation_ratio, config.async_training.max_staleness_allowed) == (1, 1)
    weights = config.correction.weights
    assert (weights.level, weights.mode, weights.lower, weights.upper) == ("token", "clamp", 0.5, 2.0)
    message = "trainer.async.max_staleness: 1 is less than the 2 batches of buffer_size; the smaller applies: "
    notes = [str(warning) for warning in check(config).warnings]
    assert [note for note in notes if "smaller" in note] == [f"{message}async_generation_ratio: 1"]
    assert "trainer.async.train_gpu_ids: is read as actor_train.device_mapping" in notes


@pytest.mark.parametrize(
    ("overrides", "bounds"),
    [
        (["trainer.async.max_staleness=3"], (2, 3)),
        (["trainer.async.buffer_size=0.5"], (0.5, 1)),
        (["max_staleness=4", "async_generation_ratio=3"], (3, 4)),
        (["trainer.type=sync"], (0, 1)),
    ],
)
def test_overrides_of_the_nested_block_win(tmp_path: Path, overrides: list[str], bounds: tuple[float, int]) -> None:
    config = rlvr(tmp_path, *overrides, text=WITHOUT_DEVICES + PUBLISHED)
    assert (config.async_generation_ratio, config.async_training.max_staleness_allowed) == bounds


def test_a_trainer_of_type_sync_ignores_its_asynchronous_section(tmp_path: Path) -> None:
    config = rlvr(tmp_path, text=RLVR + "trainer: {type: sync, async: {buffer_size: 2, max_staleness: 1}}\n")
    assert config.async_generation_ratio == 0 and config.async_training.max_staleness_allowed == 5
    assert ("trainer.async", "has no effect: trainer.type is sync") in config.source.notes


POOLS = [
    ("trainer: {nnodes: 2, n_gpus_per_node: 6}\nrollout: {nnodes: 2, n_gpus_per_node: 2}", "0-5,8-13", "6-7,14-15", 8),
    ("trainer: {nnodes: 1, n_gpus_per_node: 12}\nrollout: {nnodes: 1, n_gpus_per_node: 4}", "0-11", "12-15", 12),
    (
        "trainer: {n_gpus_per_node: 12}\nrollout: {n_gpus_per_node: 4}\nnum_devices_per_node: 16",
        "0-11",
        "12-15",
        16,
    ),
    ("trainer: {nnodes: 2, n_gpus_per_node: 8}\nrollout: {nnodes: 1, n_gpus_per_node: 8}", "0-15", "16-23", 8),
    ("trainer: {nnodes: 2}", "0-15", "0-15", 8),
    ("trainer: {nnodes: 2, n_gpus_per_node: 8}\nrollout: {nnodes: 0}", "0-15", "0-15", 8),
]


@pytest.mark.parametrize(("text", "training", "generation", "per_node"), POOLS)
def test_nodes_and_devices_of_two_pools_are_device_mappings(
    tmp_path: Path, text: str, training: str, generation: str, per_node: int
) -> None:
    text = f"{WITHOUT_DEVICES}{text}\nactor_infer: {{max_running_requests: 64}}\n"
    given = ["actor_train.training_args.gradient_accumulation_steps=1", "rollout_batch_size=96"]
    config = rlvr(tmp_path, *given, text=text)
    assert spans(config.actor_train.device_mapping) == training
    assert spans(config.actor_infer.device_mapping) == generation
    assert config.num_devices_per_node == per_node
    notes = [f"{path}: {message}" for path, message in config.source.notes]
    assert any(note.endswith(f"devices are read as actor_train.device_mapping: {training}") for note in notes), notes


def test_a_reference_in_use_shares_the_devices_of_training(tmp_path: Path) -> None:
    text = WITHOUT_DEVICES + "trainer: {nnodes: 1, n_gpus_per_node: 8}\nuse_kl_loss: true\nkl_loss_coef: 0.1\n"
    assert rlvr(tmp_path, text=text).reference.device_mapping == list(range(8))


def test_a_device_mapping_of_the_command_line_replaces_the_pools_numbers(tmp_path: Path) -> None:
    text = WITHOUT_DEVICES + "trainer: {n_gpus_per_node: 4}\nrollout: {n_gpus_per_node: 4}\n"
    config = rlvr(tmp_path, "actor_infer.device_mapping=[4,5]", text=text)
    assert (config.actor_train.device_mapping, config.actor_infer.device_mapping) == ([0, 1, 2, 3], [4, 5])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer: {nnodes: two}", "trainer.nnodes: 'two' is not a whole number of at least 1"),
        ("rollout: {nnodes: 1}", "rollout.nnodes: needs trainer.nnodes and trainer.n_gpus_per_node too"),
        (
            "num_devices_per_node: 4\ntrainer: {nnodes: 1}",
            "trainer.n_gpus_per_node: 8 devices are more than num_devices",
        ),
    ],
)
def test_pools_that_cannot_be_placed_are_refused(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(tmp_path, text=f"{WITHOUT_DEVICES}{text}\n")


def test_a_pool_without_nodes_has_no_effect(tmp_path: Path) -> None:
    config = rlvr(tmp_path, "rollout.nnodes=0")
    assert "rollout.nnodes: has no effect: there is no pool of its own" in map(str, check(config).warnings)


def test_numbers_of_a_pool_next_to_its_device_mapping_are_refused(tmp_path: Path) -> None:
    message = "trainer.n_gpus_per_node: is another spelling of actor_train.device_mapping, which is given too"
    assert message in refusal(tmp_path, text=RLVR + "trainer: {nnodes: 2}\n")


CORRECTION = (
    "algorithm: {rollout_correction: {rollout_is: token, rollout_is_threshold: 3, loss_type: ppo_clip, "
    "rollout_is_batch_normalize: false, rollout_rs: token_k1, "
)


def test_rollout_correction_is_read_with_its_bounds_inverted(tmp_path: Path) -> None:
    text = f"{RLVR}{CORRECTION}rollout_rs_threshold: '0.5_4.0', bypass_mode: false}}}}\n"
    config = rlvr(tmp_path, "loss_agg_mode=token-mean", text=text)
    weights, rejection = config.correction.weights, config.correction.rejection
    assert (weights.level, weights.lower, weights.upper) == ("token", 0, 3)
    assert (rejection.statistic, rejection.level, rejection.lower, rejection.upper) == ("k1", "token", 0.25, 2)
    assert config.correction.renormalize and config.old_log_probs_source == "recompute"
    notes = [f"{path}: {message}" for path, message in config.source.notes]
    assert "algorithm.rollout_correction.bypass_mode: false is read as old_log_probs_source: recompute" in notes
    assert any(note.startswith("algorithm.rollout_correction.rollout_is: is read as correction: ") for note in notes)


@pytest.mark.parametrize(
    ("mode", "renormalize"),
    [("token-mean", True), ("seq-mean-token-sum", False), ("seq-mean-token-sum-norm", False), (None, False)],
)
def test_the_denominator_after_a_rejection_is_that_of_verl(tmp_path: Path, mode: str | None, renormalize: bool) -> None:
    given = ["rollout_rs=seq_mean_k1", "rollout_rs_threshold=2", *([f"loss_agg_mode={mode}"] if mode else [])]
    config = rlvr(tmp_path, *given)
    assert config.correction.renormalize is renormalize
    assert any("verl divides" in message for _, message in config.source.notes) is (mode is None)


def test_batch_normalised_weights_are_read_and_recompute_log_probs(tmp_path: Path) -> None:
    keys = ("algorithm.rollout_correction.rollout_is_batch_normalize=true", "rollout_is=token")
    for ratio in (0, 1):
        config = rlvr(tmp_path, *keys, f"async_generation_ratio={ratio}", "actor_train.pg_variant=decoupled_ppo")
        assert config.correction.weights.normalize and config.old_log_probs_source == "recompute"


@pytest.mark.parametrize(("thresholds", "second"), [("'0.5_4.0,2.5'", 2.5), ("2.0", 2.0)])
def test_several_rejections_are_read(tmp_path: Path, thresholds: str, second: float) -> None:
    keys = f"{CORRECTION.replace('token_k1', repr('token_k1, seq_max_k2'))}rollout_rs_threshold: {thresholds}}}}}\n"
    correction = rlvr(tmp_path, text=f"{RLVR}{keys}").correction
    read = correction.all_rejections
    assert list(read) == ["correction.rejection", "correction.rejections.2"]
    assert (read["correction.rejection"].statistic, read["correction.rejection"].upper) == ("k1", 2)
    other = read["correction.rejections.2"]
    assert (other.statistic, other.level, other.lower, other.upper) == ("k2", "sequence-max", None, second)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("rollout_rs=token_k1", "rollout_rs token_k1 needs rollout_rs_threshold"),
        ("rollout_rs=token_k4 rollout_rs_threshold=2", "rollout_rs 'token_k4' is unknown; use token_k1, seq_mean_k1"),
        ("rollout_rs='token_k1,seq_max_k2' rollout_rs_threshold='2,3,4'", "has 2 options, but rollout_rs_threshold"),
        ("rollout_rs='token_k1,seq_max_k5' rollout_rs_threshold='2,3'", "rollout_rs 'seq_max_k5' is unknown"),
        ("rollout_rs=seq_sum_k1 rollout_rs_threshold=often", "rollout_rs_threshold 'often' is not a number above 0"),
        ("rollout_rs=[token_k1] rollout_rs_threshold=2", "rollout_rs ['token_k1'] is not text, such as token_k1"),
        ("rollout_is=token correction=token", "correction: 'token' is not a section"),
        ("rollout_is=batch", "rollout_is 'batch' is not token, sequence or null"),
        ("rollout_is=token correction.weights.level=token", "is another spelling of correction"),
    ],
)
def test_a_rollout_correction_without_meaning_is_refused(tmp_path: Path, keys: str, message: str) -> None:
    assert message in refusal(tmp_path, *keys.split())


@pytest.mark.parametrize(("value", "source"), [("true", "behavior"), ("false", "recompute")])
def test_bypass_mode_is_read(tmp_path: Path, value: str, source: str) -> None:
    config = rlvr(tmp_path, f"bypass_mode={value}")
    assert config.old_log_probs_source == source
    assert ("bypass_mode", f"{value} is read as old_log_probs_source: {source}") in config.source.notes


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("grpo_vectorized", "grpo"),
        ("rloo_vectorized", "rloo"),
        ("tir_optimal_token_baseline", "optimal_token_baseline"),
    ],
)
def test_estimators_of_verl_are_read_under_their_names_here(tmp_path: Path, name: str, own: str) -> None:
    assert rlvr(tmp_path, f"adv_estimator={name}", "calculate_sum_pi_squared=true").adv_estimator == own


@pytest.mark.parametrize("key", ["free_cache_engine", "actor_infer.free_cache_engine"])
def test_engines_that_free_their_memory_take_turns_with_the_trainer(tmp_path: Path, key: str) -> None:
    shared = ("platform=cuda", "actor_infer.device_mapping=0-15", "async_generation_ratio=0")
    assert rlvr(tmp_path, *shared, f"{key}=true").takes_turns("cpu")
    assert not rlvr(tmp_path, *shared, f"{key}=false").takes_turns("cuda")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("calculate_log_probs=true", "calculate_log_probs: has no effect: engines always return log-probs"),
        ("actor_infer.calculate_log_probs=true", "actor_infer.calculate_log_probs: has no effect"),
    ],
)
def test_keys_that_describe_the_default_are_warnings(tmp_path: Path, override: str, message: str) -> None:
    notes = [f"{path}: {message}" for path, message in rlvr(tmp_path, override).source.notes]
    assert any(note.startswith(message) for note in notes), notes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("calculate_log_probs: false", "calculate_log_probs: False is not available: engines always return log-probs"),
        ("bypass_mode: auto", "bypass_mode: 'auto' is not true or false"),
        ("bypass_mode: true\nold_log_probs_source: recompute", "bypass_mode: is another spelling of old_log_probs"),
        ("buffer_size: 1\nasync_generation_ratio: 2", "buffer_size: is another spelling of async_generation_ratio"),
        ("rollout_gpu_ids: [1]", "rollout_gpu_ids: is another spelling of actor_infer.device_mapping, which is"),
        (
            "async_generation_ratio: 2\nasync_training: {max_staleness_allowed: 1}",
            "max_staleness_allowed: 1 would drop samples",
        ),
        ("trainer: {type: fast}", "trainer.type: 'fast' is not async or sync"),
        ("trainer: {type: async}", "trainer.type: async needs the batches that generation may run ahead: set trainer."),
        ("trainer: {type: sync}\nasync_generation_ratio: 1", "trainer.type: is another spelling of async_generation_r"),
        ("trainer: {type: async, async: {buffer_size: 1, depth: 2}}", "trainer.async.depth: unknown key"),
        ("trainer: {async: {buffer_size: 1}}\nbuffer_size: 2", "another spelling of async_generation_ratio"),
        (
            "trainer: {async: {importance_sampling: true}}\nimportance_sampling: false",
            "another spelling of importance_s",
        ),
        ("async_training: {staleness_threshold: 0.3}", "0.3 is not a whole number of versions; where it is the share"),
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
