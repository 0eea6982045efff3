"""From scored samples to an update: ratios, correction of stale samples, and the checks of a step."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from roll.algorithms.advantages import GREEDY_KEYS, REWARD_PARTS, SUM_PI_SQUARED, compute_advantages
from roll.algorithms.estimators import ADV_ESTIMATORS
from roll.algorithms.options.advantage_options import TurnOptions
from roll.algorithms.options.policy_options import RatioOptions
from roll.algorithms.policy_loss import POLICY_LOSSES
from roll.algorithms.turns import TURN_KEYS
from roll.base.errors import RunError
from roll.base.timers import StepClock
from roll.configs.pipeline import RLVRConfig
from roll.datasets.batch import ROUTING, Batch
from roll.pipeline.learning.learner import LEARNER_STATE, RLLearner, corrects_nothing
from roll.pipeline.learning.shards import training_plans
from roll.rollout.rollout_batch import TAG
from roll.rollout.source import SampleBatch
from roll.trackers.sample_files import dumped_steps, read_samples
from tests.configs.samples import QWEN3_30B, RLVR, rlvr
from tests.pipeline.bigram import BigramCluster

SMALL = (
    "rollout_batch_size=2",
    "num_return_sequences_in_group=4",
    "actor_train.training_args.gradient_accumulation_steps=4",
    "actor_train.model_args.dtype=fp32",
    "actor_infer.model_args.dtype=fp32",
    "actor_train.device_mapping=[0,1]",
    "actor_train.strategy_args.strategy_config.tensor_model_parallel_size=1",
    "actor_infer.device_mapping=[2]",
)
ASYNC = "async_generation_ratio=1"


class CountingCluster(BigramCluster):
    """Counts samples whose log-probs took a pass of their own."""

    samples = 0

    async def compute_log_probs(self, shards):
        self.samples += sum(map(len, shards))
        return await super().compute_log_probs(shards)


class RoutedCluster(BigramCluster):
    """Records the ids of a sample as its experts, where it is asked for these, and keeps what training gets."""

    trained: tuple[tuple[list[int], list[int]], ...] = ()

    async def compute_log_probs(self, shards):
        answers = await super().compute_log_probs(shards)
        return [
            Batch(answer.tensors(), {ROUTING: [*shard.batch["input_ids"].numpy()]})
            if shard.meta_info["records_routing"]
            else answer
            for shard, answer in zip(shards, answers, strict=True)
        ]

    async def train_step(self, shards):
        for shard in shards:
            rows = zip(shard.batch["input_ids"], shard.non_tensor_batch[ROUTING], strict=True)
            self.trained += tuple((ids.tolist(), experts.tolist()) for ids, experts in rows)
        return await super().train_step(shards)


def learner(folder: Path, *overrides: str) -> tuple[RLLearner, BigramCluster]:
    config: RLVRConfig = rlvr(folder, *SMALL, f"output_dir={folder}", *overrides, text=RLVR)
    cluster = BigramCluster()
    return RLLearner(config, cluster, None), cluster  # type: ignore[arg-type]


def learn(parts: tuple[RLLearner, BigramCluster], data, staleness: float = 0.0) -> dict[str, float]:
    return asyncio.run(parts[0].learn(SampleBatch(data, {"staleness/max": staleness}), 1, StepClock()))


def stale_step(folder: Path, *overrides: str) -> tuple[dict[str, float], torch.Tensor]:
    """Metrics and change of weights of the second of two batches that were both sampled before the first update."""
    parts = learner(folder, *overrides)
    first, second = parts[1].sample(1), parts[1].sample(2)
    learn(parts, first)
    before = parts[1].table.detach().clone()
    return learn(parts, second, staleness=1.0), parts[1].table.detach() - before


@pytest.mark.parametrize("variant", POLICY_LOSSES)
@pytest.mark.parametrize("mode", ["", ASYNC])
def test_the_first_step_of_every_variant_passes_its_checks_and_moves_the_weights(tmp_path, variant, mode):
    parts = learner(tmp_path, f"actor_train.pg_variant={variant}", *mode.split())
    before = parts[1].table.detach().clone()
    metrics = learn(parts, parts[1].sample(1))
    assert metrics["actor/ratio_mean"] == pytest.approx(1, abs=1e-5) and metrics["correction/no_op"] == 0
    assert metrics["correction/ess"] == pytest.approx(1, abs=1e-5)
    assert not torch.equal(parts[1].table.detach(), before)


def test_fresh_samples_give_the_same_update_with_and_without_recomputed_log_probs(tmp_path):
    changes = []
    for mode in ([], [ASYNC]):
        parts = learner(tmp_path, *mode)
        learn(parts, parts[1].sample(1))
        changes.append(parts[1].table.detach())
    torch.testing.assert_close(changes[0], changes[1])


def test_tokens_are_trained_with_the_experts_that_the_log_prob_pass_recorded(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN3_30B))
    overrides = f"pretrain={tmp_path / 'model'}", "actor_train.router_replay.mode=R2"
    config = rlvr(tmp_path, *SMALL, f"output_dir={tmp_path}", *overrides, text=RLVR)
    cluster = RoutedCluster()
    parts = RLLearner(config, cluster, None), cluster
    for number in (1, 2):
        learn(parts, cluster.sample(number))
        assert len(cluster.trained) == 8 * number
    assert all(ids == experts for ids, experts in cluster.trained)


@pytest.mark.parametrize("variant", [name for name in POLICY_LOSSES if name != "vanilla"])
def test_stale_samples_are_corrected_and_give_another_update_than_vanilla(tmp_path, variant):
    metrics, change = stale_step(tmp_path, ASYNC, f"actor_train.pg_variant={variant}")
    _, plain = stale_step(tmp_path, ASYNC, "actor_train.pg_variant=vanilla")
    assert metrics["correction/no_op"] == 0 and metrics["correction/log_prob_diff_max"] > 1e-3
    assert (metrics["actor/ratio_deviation_max"] > 1e-3) == (variant != "decoupled_ppo")
    assert not torch.allclose(change, plain, rtol=1e-3, atol=1e-6)


def test_a_ratio_of_one_on_stale_samples_is_logged_as_an_error_and_counted(tmp_path, caplog):
    parts = learner(tmp_path)
    learn(parts, parts[1].sample(1))
    with caplog.at_level(logging.ERROR):
        assert learn(parts, parts[1].sample(2), staleness=0.0)["correction/no_op"] == 0
        assert not caplog.records
        assert learn(parts, parts[1].sample(3), staleness=2.0)["correction/no_op"] == 1
    assert "the correction is not working: samples are up to 2 versions old" in caplog.text


def test_steps_whose_scores_are_all_equal_are_warned_of_once(tmp_path, caplog):
    parts = learner(tmp_path)
    equal = [parts[1].sample(number) for number in range(1, 6)]
    for data in equal:
        data.batch["scores"] = torch.zeros_like(data.batch["scores"])
        learn(parts, data)
        if data is equal[1]:
            assert "advantages" not in caplog.text
    assert caplog.text.count("all advantages of the last 3 steps were 0: the samples of each prompt had equal") == 1
    learn(parts, parts[1].sample(6))
    assert parts[0]._steps_without_advantage == 0


def test_more_optimizer_steps_than_the_schedule_counts_are_warned_of_once(tmp_path, caplog):
    for kind, warnings in (("linear", 1), ("constant", 0)):
        caplog.clear()
        parts = learner(tmp_path, f"actor_train.training_args.lr_scheduler_type={kind}")
        learn(parts, parts[1].sample(1))
        assert "ends early" not in caplog.text
        for number in (2, 3):
            learn(parts, parts[1].sample(number, 32))
        assert caplog.text.count("and the learning-rate schedule counts") == warnings


def test_no_error_if_uncorrected_training_is_allowed(tmp_path, caplog):
    overrides = (ASYNC, "old_log_probs_source=recompute", "allow_uncorrected_off_policy=true")
    with caplog.at_level(logging.ERROR):
        metrics, _ = stale_step(tmp_path, *overrides)
    assert metrics["correction/no_op"] == 1 and not caplog.records


def test_decoupled_weights_and_rejection_are_those_reported(tmp_path):
    metrics, _ = stale_step(
        tmp_path,
        "correction.weights.level=token",
        "correction.weights.upper=1.01",
        "correction.rejection.statistic=k1",
        "correction.rejection.lower=0.99",
    )
    assert metrics["correction/is_weight_max"] == pytest.approx(1.01) and metrics["correction/is_weight_mean"] < 1.01
    assert 0 < metrics["correction/masked_fraction"] < 1
    assert metrics["actor/ratio_max"] == pytest.approx(1)


def test_in_bypass_weights_are_measured_where_the_loss_is_computed(tmp_path):
    metrics, _ = stale_step(
        tmp_path,
        ASYNC,
        "actor_train.pg_variant=vanilla",
        "correction.weights.level=token",
        "correction.weights.upper=1.01",
        "correction.rejection.statistic=k3",
        "correction.rejection.upper=1e-4",
    )
    assert metrics["correction/is_weight_max"] == pytest.approx(1.01) and 0 < metrics["correction/ess"] < 1
    assert 0 < metrics["correction/masked_fraction"] < 1
    assert "correction/is_weight_square_mean" not in metrics


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_renormalised_updates_are_larger_than_diluted_ones(tmp_path, mode):
    rejection = (
        f"loss_agg_mode={mode}",
        "actor_train.pg_variant=vanilla",
        "correction.rejection.statistic=k1",
        "correction.rejection.level=sequence-mean",
        "correction.rejection.lower=1.0",
    )
    _, diluted = stale_step(tmp_path, *rejection)
    metrics, whole = stale_step(tmp_path, *rejection, "correction.renormalize=true")
    assert 0 < metrics["correction/masked_fraction"] < 1
    factor = (whole.norm() / diluted.norm()).item()
    torch.testing.assert_close(whole, diluted * factor, rtol=1e-3, atol=1e-6)
    assert factor > 1.05
    if mode == "token-mean":
        assert factor == pytest.approx(1 / (1 - metrics["correction/masked_fraction"]), rel=1e-4)


def test_an_adaptive_kl_weight_moves_and_is_remembered(tmp_path):
    settings = (
        "adv_estimator=reinforce",
        "add_token_level_kl=true",
        "init_kl_coef=0.1",
        "kl_penalty=k3",
        "reference.device_mapping=[0,1]",
    )
    adaptive = (*settings, "target_kl=1e-9", "kl_horizon=80")

    def with_reference(*overrides):
        config = rlvr(tmp_path, *SMALL, f"output_dir={tmp_path}", *overrides, text=RLVR)
        return RLLearner(config, BigramCluster(), BigramCluster())

    first = with_reference(*adaptive)
    data = [BigramCluster().sample(seed) for seed in (1, 2)]
    weights = [learn((first, None), batch)["advantage/kl_coef"] for batch in data]
    assert weights == pytest.approx([0.1, 0.1 * (1 - 0.2 * 8 / 80)])
    asyncio.run(first.save(tmp_path))
    for overrides, expected in ((adaptive, 0.1 * 0.98 * 1.02), (settings, 0.1)):
        second = with_reference(*overrides)
        asyncio.run(second.load(tmp_path))
        assert learn((second, None), BigramCluster().sample(1))["advantage/kl_coef"] == pytest.approx(expected)


def test_the_number_of_steps_without_a_gradient_is_restored(tmp_path):
    first, second = (learner(tmp_path)[0] for _ in range(2))
    first._steps_without_gradient = 3
    asyncio.run(first.save(tmp_path))
    asyncio.run(second.load(tmp_path))
    assert second._steps_without_gradient == 3


def test_statistics_of_scores_go_on_after_a_resume(tmp_path):
    settings = ("adv_estimator=reinforce", "norm_mean_type=running", "norm_std_type=running")
    names = ("advantage/running_score_mean", "advantage/running_score_std", "advantage/mean", "advantage/max")

    def run(parts, *seeds):
        metrics = [learn(parts, BigramCluster().sample(seed)) for seed in seeds]
        return {name: metrics[-1][name] for name in names}

    whole, first, second, anew = (learner(tmp_path, *settings) for _ in range(4))
    expected = run(whole, 1, 2, 3)
    run(first, 1, 2)
    asyncio.run(first[0].save(tmp_path))
    asyncio.run(second[0].load(tmp_path))
    assert run(second, 3) == expected
    assert run(anew, 3) != expected


def tagged(cluster: BigramCluster, seed: int, names: list[str]) -> Batch:
    """A batch in turns whose prompts have these tags, which have other numbers in another batch."""
    data = cluster.sample(seed)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    tags = [names[group] for group in data.batch["group_ids"].tolist()]
    data.batch["scores"] *= torch.tensor([100.0 if tag == "code" else 1.0 for tag in tags])
    turns = {
        "turn_index": torch.where(data.batch["response_mask"].bool(), 0, -1),
        "turn_rewards": data.batch["scores"][:, None],
        "turn_count": torch.ones(len(data), dtype=torch.int64),
        "state_ids": data.batch["group_ids"][:, None],
        "trajectory_ids": torch.arange(len(data)),
        "tag_ids": torch.tensor([numbers[tag] for tag in tags]),
    }
    return Batch(data.tensors() | turns, {TAG: tags})


def test_statistics_of_each_tag_go_on_after_a_resume(tmp_path):
    settings = ("adv_estimator=reinforce", "norm_mean_type=running_tag", "norm_std_type=running_tag")
    batches = {1: ["math", "math"], 2: ["code", "math"], 3: ["math", "code"]}

    def run(parts, *seeds):
        return [learn(parts, tagged(parts[1], seed, batches[seed])) for seed in seeds][-1]

    whole, first, second, anew = (learner(tmp_path, *settings) for _ in range(4))
    expected = run(whole, 1, 2, 3)
    names = [name for name in expected if name.startswith("advantage/")]
    assert {name for name in names if "running" in name} == {
        f"advantage/running_score_{number}/{tag}" for number in ("mean", "std") for tag in ("math", "code")
    }
    run(first, 1, 2)
    asyncio.run(first[0].save(tmp_path))
    asyncio.run(second[0].load(tmp_path))
    found, other = run(second, 3), run(anew, 3)
    assert {name: found[name] for name in names} == {name: expected[name] for name in names}
    assert other["advantage/running_score_std/math"] != expected["advantage/running_score_std/math"]


def test_statistics_of_tags_begin_anew_from_a_checkpoint_that_has_those_of_all_scores_alone(tmp_path):
    keys = ("adv_estimator=reinforce", "norm_std_type=running")
    before, by_tag = learner(tmp_path, *keys), learner(tmp_path, keys[0], "norm_std_type=running_tag")
    learn(before, before[1].sample(1))
    asyncio.run(before[0].save(tmp_path))
    state = json.loads((tmp_path / LEARNER_STATE).read_text())
    del state["tag_score_statistics"]
    (tmp_path / LEARNER_STATE).write_text(json.dumps(state))
    asyncio.run(by_tag[0].load(tmp_path))
    data = tagged(by_tag[1], 1, ["math", "math"])
    scores = data.batch["scores"].double()
    assert learn(by_tag, data)["advantage/running_score_std/math"] == pytest.approx(float(scores.std()))


def test_statistics_of_scores_begin_anew_from_a_checkpoint_without_them(tmp_path):
    plain, _ = learner(tmp_path)
    asyncio.run(plain.save(tmp_path))
    assert "score_statistics" not in (tmp_path / LEARNER_STATE).read_text()
    running = learner(tmp_path, "adv_estimator=reinforce", "norm_std_type=running")
    asyncio.run(running[0].load(tmp_path))
    batch = running[1].sample(1)
    scores = batch.batch["scores"]
    assert learn(running, batch)["advantage/running_score_std"] == pytest.approx(float(scores.double().std()))


@dataclass
class Agent(TurnOptions, RatioOptions, RLVRConfig):
    """A run whose samples have turns."""


class RecordingCluster(BigramCluster):
    """Remembers which tensors reached the loss."""

    async def train_step(self, shards):
        self.seen = set(shards[0].tensors())
        return await super().train_step(shards)


def learn_trajectories(
    folder: Path, padding: int = 0, lift: float = 0.0, **settings
) -> tuple[dict[str, float], RecordingCluster]:
    """One step on samples of two turns, then `padding` samples that are masked out; `lift` is added to scores."""
    cluster = RecordingCluster()
    data = cluster.sample(1)
    data.batch["scores"] += lift
    mask = data.batch["response_mask"].bool()
    turn = (mask.cumsum(-1) > 2).long()
    more = {
        "turn_index": torch.where(mask, turn, -1),
        "turn_rewards": torch.stack([torch.zeros(8), data.batch["scores"]], dim=1),
        "turn_count": torch.full((8,), 2),
        "state_ids": torch.stack([data.batch["group_ids"] * 2, data.batch["group_ids"] * 2 + 1], dim=1),
        "trajectory_ids": torch.arange(8),
        "tag_ids": torch.zeros(8, dtype=torch.int64),
        "greedy_scores": torch.full((8,), 0.25),
        "greedy_lengths": torch.full((8,), 4),
        REWARD_PARTS: data.batch["scores"][:, None],
    }
    data = Batch(data.tensors() | more, {TAG: ["math"] * 8})
    idle = data.select_idxs(range(padding)).tensors() | {"group_ids": torch.arange(padding) + 8}
    idle |= {"response_mask": torch.zeros_like(idle["response_mask"]), "trajectory_ids": torch.arange(padding) + 8}
    if padding:
        data = Batch(
            {key: torch.cat([value, idle[key]]) for key, value in data.tensors().items()},
            {TAG: ["math"] * 8 + [""] * padding},
        )
    config = Agent(**vars(rlvr(folder, *SMALL, f"output_dir={folder}", text=RLVR)) | settings)
    config.actor_train.training_args.gradient_accumulation_steps += padding // 2
    return learn((RLLearner(config, cluster, None), cluster), data), cluster


@pytest.mark.parametrize("ratio_type", ["token", "segment", "sequence"])
def test_of_turns_greedy_responses_and_rewards_only_turn_index_reaches_the_loss_if_ratio_type_needs_it(
    tmp_path, ratio_type
):
    metrics, cluster = learn_trajectories(tmp_path, ratio_type=ratio_type)
    assert cluster.seen & {*TURN_KEYS, *GREEDY_KEYS, REWARD_PARTS} == (
        {"turn_index"} if ratio_type == "segment" else set()
    )
    assert metrics["actor/ratio_mean"] == pytest.approx(1, abs=1e-5)


WITHOUT_MODEL = [name for name, each in ADV_ESTIMATORS.items() if each.needs not in ("values", "teacher_kl")]
"""Estimators that need no second model."""


@pytest.mark.parametrize("estimator", WITHOUT_MODEL)
def test_padding_changes_nothing_of_an_update(tmp_path, estimator):
    plain, cluster = learn_trajectories(tmp_path, adv_estimator=estimator)
    padded, other = learn_trajectories(tmp_path, padding=2, adv_estimator=estimator)
    assert padded == pytest.approx(plain, abs=1e-5)
    torch.testing.assert_close(other.table, cluster.table)
    assert SUM_PI_SQUARED not in cluster.seen


SHAPING = {
    "length": {"length_penalty_per_token": 0.05, "length_reward_coef": 0.5},
    "difficulty": {"difficulty_loss_weight": True},
    "tag": {"adv_estimator": "reinforce", "norm_mean_type": "tag", "norm_std_type": "tag"},
    "running": {"adv_estimator": "reinforce", "norm_mean_type": "running", "norm_std_type": "running"},
    "running by tag": {
        "adv_estimator": "reinforce",
        "norm_mean_type": "running_tag",
        "norm_std_type": "running_tag",
    },
    "weights by length": {"length_loss_weight": True},
}
BY_TAG = ("tag", "running by tag")
"""The cases of SHAPING that read the tags of samples."""


@pytest.mark.parametrize("keys", SHAPING.values(), ids=SHAPING)
def test_padding_changes_nothing_of_an_update_with_shaped_scores(tmp_path, keys):
    plain, cluster = learn_trajectories(tmp_path, lift=1.0, **keys)
    padded, other = learn_trajectories(tmp_path, padding=2, lift=1.0, **keys)
    assert padded == pytest.approx(plain, abs=1e-5)
    torch.testing.assert_close(other.table, cluster.table)
    unshaped = learn_trajectories(tmp_path, lift=1.0, adv_estimator=keys.get("adv_estimator", "grpo"))[1]
    assert not torch.allclose(unshaped.table, cluster.table)


@pytest.mark.parametrize("keys", [keys for name, keys in SHAPING.items() if name not in BY_TAG])
def test_micro_batches_change_nothing_of_an_update_with_shaped_scores(tmp_path, keys):
    args, overrides = "actor_train.training_args", [f"{key}={str(value).lower()}" for key, value in keys.items()]
    tables = []
    for size, steps in ((1, 4), (2, 2), (4, 1)):
        split = (f"{args}.per_device_train_batch_size={size}", f"{args}.gradient_accumulation_steps={steps}")
        parts = learner(tmp_path, *overrides, *split)
        data = parts[1].sample(1)
        data.batch["scores"] += 1
        learn(parts, data)
        tables.append(parts[1].table.detach())
    torch.testing.assert_close(tables[1], tables[0])
    torch.testing.assert_close(tables[2], tables[0])


def test_the_optimal_token_baseline_reads_the_weights_of_the_correction_and_probabilities_of_the_trainer(tmp_path):
    parts = learner(
        tmp_path,
        "adv_estimator=optimal_token_baseline",
        "correction.weights.level=token",
        "correction.weights.upper=1.01",
    )
    first, data = parts[1].sample(1), parts[1].sample(2)
    learn(parts, first)
    squares = parts[1].table.detach().softmax(-1).square().sum(-1)[data.batch["input_ids"][:, :-1]]
    learn(parts, data, staleness=1.0)
    batch = parts[0]._written.batch
    given = (batch["scores"], batch["group_ids"], batch["response_mask"], parts[0]._advantage_config)
    probabilities = {"log_probs": batch["old_log_probs"], "sum_pi_squared": torch.nn.functional.pad(squares, (1, 0))}
    plain = compute_advantages(*given, **probabilities).advantages
    weighted = compute_advantages(*given, **probabilities, correction_weights=batch["correction_weights"]).advantages
    torch.testing.assert_close(batch["advantages"], weighted)
    assert not torch.allclose(batch["advantages"], plain)


def test_optimizer_steps_of_padding_alone_are_not_made(tmp_path):
    (made, cluster) = learner(tmp_path)
    data = cluster.sample(1, samples=24)
    role = made._config.actor_train
    per_step = role.samples_per_optimizer_step
    assert len(training_plans(data, role, "cpu")) == 24 // per_step > 2
    data.batch["response_mask"][per_step + 1 :] = 0
    kept = training_plans(data, role, "cpu")
    assert len(kept) == 2
    data.batch["response_mask"][:] = 0
    assert len(training_plans(data, role, "cpu")) == 1


@pytest.mark.parametrize(
    ("ratio", "weight", "staleness", "no_op"),
    [
        (0.0, None, 1.0, True),
        (9e-7, None, 1.0, True),
        (2e-6, None, 1.0, False),
        (0.0, None, 0.0, False),
        (0.0, 1e-3, 1.0, False),
        (0.0, 0.0, 1.0, True),
        (float("nan"), None, 1.0, False),
    ],
)
def test_a_correction_corrects_nothing_where_all_ratios_and_weights_are_one(ratio, weight, staleness, no_op):
    assert corrects_nothing(ratio, weight, staleness) == no_op


def test_samples_are_written_with_the_log_probs_that_training_saw(tmp_path):
    made, cluster = learner(tmp_path, "rollout_dump_steps=2")
    for step in (1, 2, 3, 4):
        asyncio.run(made.learn(SampleBatch(cluster.sample(step), {}), step, StepClock()))
    assert dumped_steps(tmp_path / "samples") == [1, 3, 4]
    for row in read_samples(tmp_path / "samples", 1):
        assert row["train_log_probs"] == pytest.approx(row["behavior_log_probs"], abs=1e-6)
        assert len(row["advantages"]) == len(row["response_ids"])


def test_samples_are_not_written_where_no_step_is_kept(tmp_path):
    made, cluster = learner(tmp_path, "rollout_dump_steps=0")
    asyncio.run(made.learn(SampleBatch(cluster.sample(1), {}), 1, StepClock()))
    assert not (tmp_path / "samples").exists()


MASKS = ("max_len_mask=true", "difficulty_mask=true", "difficulty_low_threshold=-10", "difficulty_high_threshold=10")


def with_masks(data, truncated: list[bool]):
    """A batch with the tensors that masks of samples read."""
    data.batch["trajectory_ids"], data.batch["truncated"] = torch.arange(8), torch.tensor(truncated)
    return data


def test_a_response_that_was_cut_has_no_gradient_and_is_counted(tmp_path):
    cut = [False, True, False, False, True, False, False, False]
    changes = []
    for scores in (0.0, 5.0):
        parts = learner(tmp_path, *MASKS, "adv_estimator=reinforce")
        before, data = parts[1].table.detach().clone(), with_masks(parts[1].sample(1), cut)
        data.batch["scores"][torch.tensor(cut)] = scores
        metrics = learn(parts, data)
        assert metrics["advantage/learned_samples"] == pytest.approx(6 / 8)
        changes.append(parts[1].table.detach() - before)
    assert changes[0].abs().max() > 0
    torch.testing.assert_close(changes[0], changes[1])


def test_a_batch_that_is_left_out_whole_moves_nothing(tmp_path):
    parts = learner(tmp_path, *MASKS)
    before = parts[1].table.detach().clone()
    metrics = learn(parts, with_masks(parts[1].sample(1), [True] * 8))
    assert metrics["advantage/learned_samples"] == 0
    torch.testing.assert_close(parts[1].table.detach(), before)


def test_a_log_prob_that_is_infinite_ends_the_run_with_its_role_and_sample(tmp_path):
    parts = learner(tmp_path)
    data = parts[1].sample(1)
    column = data.batch["response_mask"][2].nonzero()[0]
    data.batch["behavior_log_probs"][2, column] = -torch.inf
    with pytest.raises(
        RunError, match="behavior_log_probs of actor_infer are infinite or NaN in 1 of 8 samples, sample 2"
    ):
        learn(parts, data)


GIVEN_BY_TRAINING = {
    "on-policy": (),
    "stale, decoupled": ("actor_train.pg_variant=decoupled_ppo", ASYNC, "old_log_probs_source=recompute"),
    "weights and rejection": (
        "correction.weights.level=token",
        "correction.weights.upper=1.01",
        "correction.rejection.statistic=k1",
        "correction.rejection.lower=0.99",
    ),
    "mask of sequences": ("correction.opsm_delta=0.0001",),
    "KL in the loss": ("use_kl_loss=true", "kl_loss_coef=0.01", "reference.device_mapping=[0,1]"),
}


@pytest.mark.parametrize(("steps", "epochs"), [(1, 1), (1, 2), (2, 1), (4, 2)])
@pytest.mark.parametrize("overrides", GIVEN_BY_TRAINING.values(), ids=GIVEN_BY_TRAINING.keys())
def test_the_first_optimizer_step_of_a_batch_needs_no_pass_for_old_log_probs(tmp_path, overrides, steps, epochs):
    """Metrics and weights are those of a run with the pass; the first step has it, because it compares both passes."""
    outcomes = []
    count = f"actor_train.training_args.gradient_accumulation_steps={4 // steps}"
    overrides = (*overrides, f"ppo_epochs={epochs}", count)
    for separate in (False, True):
        config = rlvr(tmp_path, *SMALL, f"output_dir={tmp_path}", *overrides, text=RLVR)
        cluster, own_pass = CountingCluster(), []
        parts = RLLearner(config, cluster, BigramCluster() if config.uses_reference else None), cluster
        parts[0]._separate_pass = separate
        batches = [cluster.sample(seed) for seed in (1, 2, 3)]
        for batch in batches:
            metrics = learn(parts, batch, staleness=0.0)
            own_pass.append(cluster.samples)
        written = parts[0]._written.tensors()
        kept = {key: value for key, value in written.items() if key.startswith(("old_", "correction"))}
        outcomes.append((metrics, cluster.table.detach().clone(), kept))
        later = 8 if separate else 8 - 8 // steps
        assert own_pass == [8, 8 + later, 8 + 2 * later]
    (metrics, *tensors), (expected, *expected_tensors) = outcomes
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(tensors, expected_tensors, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "overrides",
    [
        ("add_token_level_kl=true", "init_kl_coef=0.1", "reference.device_mapping=[0,1]"),
        ("actor_train.pg_variant=kl_cov",),
        ("correction.m2_threshold=0.01",),
        ("correction.weights.level=token", "correction.weights.upper=2", "correction.weights.normalize=true"),
    ],
)
def test_what_reads_old_log_probs_before_the_training_pass_gets_them(tmp_path, overrides):
    config = rlvr(tmp_path, *SMALL, f"output_dir={tmp_path}", *overrides, text=RLVR)
    cluster = CountingCluster()
    parts = RLLearner(config, cluster, BigramCluster() if config.uses_reference else None), cluster
    for seed in (1, 2):
        learn(parts, cluster.sample(seed))
    assert cluster.samples == 16


def test_the_first_optimizer_step_with_real_samples_gives_their_old_log_probs(tmp_path):
    parts = learner(tmp_path, "actor_train.training_args.gradient_accumulation_steps=1")
    learn(parts, parts[1].sample(1))
    data = parts[1].sample(2)
    data.batch["response_mask"][:3] = False  # the whole first optimizer step, and half of the second
    mask, before = data.batch["response_mask"], parts[1].log_probs(data.batch["input_ids"]).detach()
    learn(parts, data)
    torch.testing.assert_close(parts[0]._written.batch["old_log_probs"], before * mask)


def test_log_probs_that_training_gives_are_checked_and_never_written_as_zeros(tmp_path):
    class Failing(BigramCluster):
        steps = 0

        async def train_step_with_log_probs(self, shards):
            self.steps += 1
            if self.steps == 2 and self.fails:
                raise RunError("the gradient is not finite")
            answers = await super().train_step_with_log_probs(shards)
            for _, scores in answers if self.steps == 2 else ():
                scores.batch["log_probs"][:] = -torch.inf
            return answers

    config = rlvr(tmp_path, *SMALL, f"output_dir={tmp_path}", text=RLVR)
    for Failing.fails, message in ((False, "old_log_probs of actor_train are infinite or NaN"), (True, "gradient")):
        cluster = Failing()
        parts = RLLearner(config, cluster, None), cluster
        learn(parts, cluster.sample(1))
        batch = cluster.sample(2)
        with pytest.raises(RunError, match=message):
            learn(parts, batch)
        assert ("old_log_probs" in parts[0]._written) == (not Failing.fails)


def test_a_subclass_of_the_learner_gets_old_log_probs(tmp_path):
    class Other(RLLearner):
        pass

    cluster = CountingCluster()
    parts = Other(rlvr(tmp_path, *SMALL, f"output_dir={tmp_path}", text=RLVR), cluster, None), cluster
    for seed in (1, 2):
        learn(parts, cluster.sample(seed))
    assert cluster.samples == 16


@pytest.mark.parametrize(("lower", "no_op"), [(0.99, 0.0), (1e-6, 1.0)])
def test_rejection_is_a_correction_if_it_leaves_tokens_out(tmp_path, lower, no_op):
    rejection = ("correction.rejection.statistic=k1", f"correction.rejection.lower={lower}")
    metrics, _ = stale_step(tmp_path, *rejection)
    assert (metrics["correction/masked_fraction"] > 0) == (no_op == 0)
    assert metrics["actor/ratio_deviation_max"] == 0 and metrics["correction/no_op"] == no_op


def test_samples_that_are_left_out_do_not_count_where_the_loss_is_renormalized(tmp_path):
    cut, steps = [False] * 4 + [True] * 4, []
    for renormalize in ("false", "true"):
        options = ("max_len_mask=true", "adv_estimator=reinforce", "loss_agg_mode=token-mean", "max_grad_norm=1e9")
        parts = learner(tmp_path, *options, "correction.veto_threshold=1e-30", f"correction.renormalize={renormalize}")
        before = parts[1].table.detach().clone()
        metrics = learn(parts, with_masks(parts[1].sample(1), cut))
        assert metrics["correction/masked_fraction"] == 0 and metrics["actor/ratio_mean"] == pytest.approx(1)
        steps.append(parts[1].table.detach() - before)
    torch.testing.assert_close(*steps)


TEACHER = ("adv_estimator=opd", "reference.device_mapping=[0,1]", "reference.model_args.model_name_or_path=a/teacher")


def distilled(folder: Path, *overrides: str, steps: int = 1) -> tuple[list[dict[str, float]], BigramCluster, Tensor]:
    """Metrics of the steps, the policy after them, and the table of the teacher."""
    config: RLVRConfig = rlvr(folder, *SMALL, f"output_dir={folder}", *TEACHER, *overrides, text=RLVR)
    policy, teacher = BigramCluster(), BigramCluster()
    teacher.table = torch.randn(teacher.table.shape, generator=torch.Generator().manual_seed(9)).requires_grad_()
    parts = RLLearner(config, policy, teacher), policy  # type: ignore[arg-type]
    metrics = [learn(parts, policy.sample(step)) for step in range(steps)]
    return metrics, policy, teacher.table.detach()


@pytest.mark.parametrize("top_k", [2, 5])
@pytest.mark.parametrize("divergence", ["reverse", "forward", "jsd"])
@pytest.mark.parametrize("mode", [[], [ASYNC]])
def test_a_policy_distilled_over_the_tokens_of_a_teacher_comes_to_agree_with_it(
    tmp_path, top_k, divergence, mode, caplog
):
    """Jensen-Shannon is about a quarter of a KL divergence where both are small, and less of it elsewhere."""
    coefficient = 16 if divergence == "jsd" else 1
    keys = (f"opd_top_k={top_k}", f"opd_divergence={divergence}", f"opd_kl_coef={coefficient}")
    keys += ("loss_agg_mode=token-mean", *mode)
    metrics, policy, teacher = distilled(tmp_path, *keys, steps=40)
    assert metrics[0]["advantage/max"] == metrics[0]["advantage/min"] == metrics[0]["actor/pg_loss"] == 0
    assert metrics[0]["actor/loss"] == pytest.approx(coefficient * metrics[0]["actor/opd_loss"])
    assert metrics[-1]["actor/opd_loss"] < 0.4 * metrics[0]["actor/opd_loss"]
    assert "so nothing was learned" not in caplog.text
    if top_k == 5:
        assert metrics[0]["actor/teacher_top_k_mass"] == pytest.approx(1, abs=1e-5)
        before, after = (table.log_softmax(-1) for table in (BigramCluster().table.detach(), policy.table.detach()))
        distances = [(teacher.softmax(-1) * (teacher.log_softmax(-1) - one)).sum() for one in (before, after)]
        assert distances[1] < 0.6 * distances[0]
    else:
        assert 0.3 < metrics[0]["actor/teacher_top_k_mass"] < 1


@pytest.mark.parametrize("mode", [[], [ASYNC], ["whiten_advantages=true"]])
def test_a_policy_distilled_by_its_own_samples_comes_closer_to_the_teacher(tmp_path, mode):
    metrics, policy, teacher = distilled(tmp_path, "loss_agg_mode=token-mean", *mode, steps=60)
    tables = (table.log_softmax(-1) for table in (BigramCluster().table.detach(), policy.table.detach()))
    before, after = ((one.exp() * (one - teacher.log_softmax(-1))).sum() for one in tables)
    assert metrics[0]["actor/pg_loss"] != 0 and after < 0.7 * before, (before, after)


def test_one_step_over_all_words_follows_the_gradient_of_the_kl_divergence(tmp_path):
    _, policy, teacher = distilled(tmp_path, "opd_top_k=5", "opd_kl_coef=0.5", "loss_agg_mode=token-mean")
    start = BigramCluster()
    data = start.sample(0)
    mask, before = data.batch["response_mask"][:, 1:], data.batch["input_ids"][:, :-1]
    log_probs, of_teacher = start.table.log_softmax(-1)[before][mask], teacher.log_softmax(-1)[before][mask]
    loss = 0.5 * (log_probs.exp() * (log_probs - of_teacher)).sum(-1).mean()
    loss.backward()
    torch.testing.assert_close(start.table - policy.table.detach(), 0.5 * start.table.grad, atol=1e-6, rtol=1e-4)


def test_a_divergence_to_a_teacher_is_added_to_the_loss_of_scores(tmp_path):
    keys = ("adv_estimator=grpo", "use_opd=true")
    changes = []
    for more in ((), ("opd_top_k=5",), ("opd_top_k=5", "opd_kl_coef=3")):
        metrics, policy, _ = distilled(tmp_path, *keys, *more)
        changes.append(policy.table.detach())
        if more:
            assert metrics[0]["advantage/max"] > 0 and metrics[0]["advantage/teacher_kl"] != 0
            coefficient = 3 if len(more) > 1 else 1
            total = metrics[0]["actor/pg_loss"] + coefficient * metrics[0]["actor/opd_loss"]
            assert metrics[0]["actor/loss"] == pytest.approx(total, abs=1e-6)
    assert not torch.allclose(changes[0], changes[1]) and not torch.allclose(changes[1], changes[2])
