"""Each role has the keys it reads; keys of other roles are dropped with a remark or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.base.schema import declared, known_keys
from roll.configs.check import check
from roll.configs.pipeline import RLVRConfig
from roll.configs.roles import (
    ROLES,
    ActorInferConfig,
    ActorTrainConfig,
    CriticConfig,
    MegatronInferArguments,
    MegatronTrainConfig,
    ReferenceConfig,
    RoleConfig,
    ValidationConfig,
)
from roll.configs.scoring.scoring_roles import JudgeConfig, RewardModelRoleConfig
from roll.loading.load import PIPELINES
from tests.configs.samples import SFT, refusal, rlvr, sft

CLASSES = {
    "actor_train": ActorTrainConfig,
    "actor_infer": ActorInferConfig,
    "reference": ReferenceConfig,
    "critic": CriticConfig,
    "reward": RewardModelRoleConfig,
    "judge": JudgeConfig,
    "validation": ValidationConfig,
}


def paths(role: str) -> set[str]:
    return {key.path for key in known_keys(CLASSES[role])}


@pytest.mark.parametrize(
    ("role", "missing"),
    [
        ("actor_train", ["generating_args", "max_running_requests", "num_gpus_per_worker"]),
        (
            "actor_infer",
            ["training_args", "data_args", "pg_variant", "infer_batch_size", "model_args.attn_implementation"],
        ),
        ("reference", ["training_args", "pg_variant", "use_dynamic_batching_in_train", "generating_args"]),
        ("reference", ["strategy_args.strategy_config.use_distributed_optimizer"]),
        ("validation", ["device_mapping", "strategy_args", "model_args", "data_args.shuffle"]),
    ],
)
def test_a_key_that_a_role_does_not_read_does_not_exist_there(role: str, missing: list[str]) -> None:
    assert paths(role).isdisjoint(missing)
    assert all(any(path in paths(other) for other in ROLES) for path in missing)


def test_every_reason_belongs_to_a_key_that_only_other_roles_have() -> None:
    for role, cls in CLASSES.items():
        for path in cls.absent_keys:
            others = {key for other in ROLES if other != role for key in paths(other)}
            assert any(key == path or key.startswith(f"{path}.") for key in others - paths(role)), (role, path)


def test_pipelines_use_the_class_of_each_role_or_one_with_its_keys() -> None:
    for root in PIPELINES.values():
        roles = {name: key.hint for name, key in declared(root).items() if name in ROLES}
        assert {"actor_train", "validation"} <= roles.keys()
        assert all(issubclass(hint, CLASSES[name]) for name, hint in roles.items())
        keys = {name: declared(hint).keys() for name, hint in roles.items()}
        assert all(keys[name] == declared(CLASSES[name]).keys() for name in roles)


DROPPED = {
    "actor_infer.training_args.learning_rate=1": "has no effect: only actor_train has an optimizer",
    "reference.training_args={learning_rate: 1}": "reference.training_args.learning_rate: has no effect: only",
    "reference.max_running_requests=5": "has no effect: it belongs to actor_infer",
    "reference.infer_batch_size=2": "has no effect: neither use_kl_loss nor add_token_level_kl is on",
    "reference.strategy_args.strategy_config.overlap_grad_reduce=true": "has no effect: the reference is not trained",
    "actor_infer.use_dynamic_batching_in_train=true": "has no effect: it belongs to actor_train",
    "actor_train.generation_timeout_s=5": "has no effect: it belongs to actor_infer",
}


@pytest.mark.parametrize(("override", "message"), DROPPED.items())
def test_a_key_of_another_role_is_a_warning(tmp_path: Path, override: str, message: str) -> None:
    path = override.partition("=")[0]
    (warning,) = [str(item) for item in check(rlvr(tmp_path, override)).warnings]
    assert warning.startswith(path) and message in warning


REFUSED = {
    "actor_infer.pg_variant=tis": "actor_infer.pg_variant: has no effect: only actor_train has a policy loss",
    "validation.strategy_args.strategy_name=sglang2": "has no effect: validation generates with actor_infer's engine",
    "reference.num_gpus_per_worker=2": "set strategy_config.tensor_model_parallel_size instead",
    "actor_infer.learning_rate=1": "actor_infer.learning_rate: unknown key; this key belongs at "
    "actor_train.training_args.learning_rate",
    "actor_infer.training_args.learning_rat=1": "actor_infer.training_args: unknown key",
}


@pytest.mark.parametrize(("override", "message"), REFUSED.items())
def test_misleading_key_of_another_role_is_an_error(tmp_path: Path, override: str, message: str) -> None:
    assert message in refusal(tmp_path, override)


def test_defaults_of_keys_of_other_roles_are_accepted(tmp_path: Path) -> None:
    given = ["actor_infer.training_args.learning_rate=1e-6", "actor_train.num_gpus_per_worker=1"]
    assert check(rlvr(tmp_path, *given)).warnings == []


def test_section_of_another_role_is_dropped(tmp_path: Path) -> None:
    config = rlvr(tmp_path, "reference.generating_args.temperature=0.5")
    assert [path for path in config.source.given if path.startswith("reference")] == []


def test_keys_of_other_roles_in_sft(tmp_path: Path) -> None:
    assert "validation generates on actor_infer's devices" in refusal(
        tmp_path, "validation.device_mapping=[0]", text=SFT
    )
    (warning,) = check(sft(tmp_path, "validation.training_args.learning_rate=1")).warnings
    assert "only actor_train has an optimizer" in warning.message


def test_an_engine_of_another_role_is_refused_without_its_options(tmp_path: Path) -> None:
    message = refusal(
        tmp_path, "reference.strategy_args={strategy_name: megatron_train, strategy_config: {nothing: 1}}"
    )
    assert message.endswith(
        "reference.strategy_args.strategy_name: megatron_train cannot run reference; use megatron_infer"
    )


def test_layouts_follow_from_devices_and_sizes() -> None:
    train = ActorTrainConfig(device_mapping=list(range(16)))
    train.strategy_args.strategy_config = MegatronTrainConfig(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=4
    )
    assert (train.layout.tensor, train.layout.data, train.layout.pipeline) == (2, 2, 4)
    train.training_args.gradient_accumulation_steps = 3
    assert train.samples_per_optimizer_step == 6
    infer = ActorInferConfig(device_mapping=list(range(8)), num_gpus_per_worker=4)
    assert (infer.layout.tensor, infer.layout.data) == (4, 2)
    assert RoleConfig(device_mapping=[3, 4]).layout.data == 2
    assert isinstance(RoleConfig().strategy_args, MegatronInferArguments)


def test_micro_batches_are_limited_by_tokens_only_with_dynamic_batching() -> None:
    train = ActorTrainConfig(max_tokens_per_microbatch_in_train=7, max_tokens_per_microbatch_in_infer=8)
    assert (train.training_token_limit, train.forward_token_limit) == (None, None)
    train.use_dynamic_batching_in_train = train.use_dynamic_batching_in_infer = True
    assert (train.training_token_limit, train.forward_token_limit) == (7, 8)


def test_configurations_do_not_share_roles() -> None:
    one, other = RLVRConfig(), RLVRConfig()
    one.actor_train.strategy_args.strategy_config.tensor_model_parallel_size = 2
    assert other.actor_train.layout.tensor == 1


@pytest.mark.parametrize(
    ("values", "sizes"),
    [
        ([], (16, 16, 16)),
        (["actor_train.training_args.per_device_train_batch_size=64"], (64, 64, 64)),
        (["actor_train.training_args.per_device_train_batch_size=64", "reference.infer_batch_size=4"], (64, 4, 64)),
        (["actor_train.training_args.per_device_train_batch_size=64", "actor_train.infer_batch_size=16"], (16, 64, 64)),
        (["critic.training_args.per_device_train_batch_size=32"], (16, 16, 32)),
    ],
)
def test_a_forward_pass_takes_as_many_samples_as_a_training_pass(
    tmp_path: Path, values: list[str], sizes: tuple[int, int, int]
) -> None:
    config = rlvr(tmp_path, "actor_train.training_args.gradient_accumulation_steps=1", *values)
    assert sizes == tuple(role.infer_batch_size for role in (config.actor_train, config.reference, config.critic))


def test_few_newer_requests_start_beside_older_ones_on_a_cpu_unless_the_file_says_otherwise() -> None:
    assert [ActorInferConfig().newer_requests(platform) for platform in ("cpu", "cuda")] == [4, None]
    set_in_file = ActorInferConfig(max_newer_requests=0)
    assert [set_in_file.newer_requests(platform) for platform in ("cpu", "cuda")] == [0, 0]
    assert JudgeConfig().newer_requests("cpu") is None
