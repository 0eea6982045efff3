"""The configuration of a run: what all pipelines share, and what SFT, RL and RLVR add."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any, Literal

from roll.algorithms.advantages import AdvantageSettings
from roll.algorithms.options.advantage_options import (
    AdvantageOptions,
    CriticOptions,
)
from roll.algorithms.options.policy_options import PolicyOptions, PolicySettings, proximal_source, ratio_base
from roll.algorithms.options.preference_options import DPOOptions, RewardModelOptions
from roll.algorithms.options.shaping_options import SampleMaskOptions
from roll.algorithms.registry import UserOptions
from roll.base.schema import Condition, needs, one_or_many, option, part
from roll.configs.arguments import LONGEST_SAMPLING_MASK
from roll.configs.asynchronous import DEFAULT_MAX_STALENESS, AsyncOptions, versions_ahead
from roll.configs.learning.lora import LoraArguments, by_policy, merging_rounds, without_base
from roll.configs.roles import (
    DEVICE_ROLES,
    ActorInferConfig,
    ActorTrainConfig,
    CriticConfig,
    ReferenceConfig,
    RewardModelTrainConfig,
    RoleConfig,
    TrainedRoleConfig,
    ValidationConfig,
)
from roll.configs.run_options import EngineOptions, LoopOptions, RolloutOptions, TrainerOptions
from roll.configs.scoring.built_in_rewards import scoring_role
from roll.configs.scoring.rewards import RewardConfig
from roll.configs.scoring.scoring_roles import JudgeConfig, RewardEngineConfig, RewardModelRoleConfig
from roll.configs.trackers import TrackerOptions


def role_seed(seed: int, *names: Any) -> int:
    """A seed in [0, 2^31) that depends on the run's seed and on `names`, the same in every process."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") & 0x7FFFFFFF


VALIDATES = needs("eval_steps", "eval_steps is 0, so nothing is validated")


@dataclass
class BaseConfig(LoopOptions, TrackerOptions):
    """The keys of all pipelines."""

    num_devices_per_node: int | None = option(
        None,
        "Devices of one node; default on cpu: its cores, on cuda: its GPUs (8 when planning elsewhere).",
        ge=1,
        usual=(1, 1024),
    )
    model_download_type: Literal["HUGGINGFACE_HUB", "MODELSCOPE"] | None = option(
        None, "Where models given by name come from; default: ModelScope if USE_MODELSCOPE is 1, else Hugging Face."
    )
    max_restarts: int = option(
        3,
        "Times that a run starts again by itself, from its newest checkpoint, after a training rank died, and that the "
        "rollout process is replaced; 0: it ends.",
        ge=0,
        usual=(0, 1000),
    )
    custom_modules: list[str] = option(
        factory=list,
        parse=one_or_many,
        help="Modules of yours that register losses, estimators, families, trackers or transports; "
        "every process imports them.",
    )
    validation: ValidationConfig = option(
        factory=ValidationConfig,
        only_for=VALIDATES,
        help="Data and sampling of validation; it owns no devices. Keys of data_args and generating_args that are not "
        "given are those of training, except file_name, and num_return_sequences, which is 1.",
    )

    @property
    def uses_reference(self) -> bool:
        """Whether a KL term needs the frozen model."""
        return False

    @property
    def uses_critic(self) -> bool:
        return False

    @property
    def uses_reward_model(self) -> bool:
        return False

    @property
    def uses_judge(self) -> bool:
        return False

    def data_roles(self) -> list[str]:
        return ["actor_train", *(["validation"] if self.eval_steps else [])]

    def device_roles(self) -> dict[str, RoleConfig]:
        """The roles of this run that own devices, by name; a frozen model or critic that nothing uses owns none."""
        used = {
            "reference": self.uses_reference,
            "critic": self.uses_critic,
            "reward": self.uses_reward_model,
            "judge": self.uses_judge,
        }
        names = [name for name in DEVICE_ROLES if used.get(name, True)]
        roles: dict[str, RoleConfig] = {name: getattr(self, name) for name in names if hasattr(self, name)}
        return {name: role for name, role in roles.items() if role.device_mapping}


@dataclass
class SFTConfig(BaseConfig):
    """Supervised fine-tuning: loss on the answer only. A batch is one optimizer step of actor_train."""

    pipeline: Literal["sft"] = option("sft", "Which pipeline this file is for.")
    target_loss: float | None = option(
        None,
        "The run ends early, as soon as val/loss of a validation is at or below this.",
        gt=0,
        usual=(1e-6, 20.0),
        only_for=needs("eval_steps", "it is never measured, since eval_steps is 0; use eval_steps 10", is_error=True),
    )


@dataclass
class PreferenceConfig(BaseConfig):
    """Learning from pairs of a better and a worse response. A batch is one optimizer step of actor_train, in pairs."""


@dataclass
class DPOConfig(DPOOptions, PreferenceConfig):
    """A policy that learns to prefer the better responses."""

    pipeline: Literal["dpo"] = option("dpo", "Which pipeline this file is for.")
    reference: ReferenceConfig = option(factory=ReferenceConfig, help="The frozen model that the policy starts from.")

    @property
    def uses_reference(self) -> bool:
        """Always: the loss compares with it."""
        return True


@dataclass
class RewardModelConfig(RewardModelOptions, PreferenceConfig):
    """A model that learns to give the better response the higher reward."""

    pipeline: Literal["reward_model"] = option("reward_model", "Which pipeline this file is for.")
    actor_train: RewardModelTrainConfig = option(factory=RewardModelTrainConfig, help="The role that is trained.")


@dataclass
class LearnerOptions(
    UserOptions, PolicyOptions, AdvantageOptions, CriticOptions, SampleMaskOptions, AsyncOptions, TrainerOptions
):
    """What the learner of reinforcement learning reads."""

    actor_infer: ActorInferConfig = option(factory=ActorInferConfig, help="The role that generates.")
    reference: ReferenceConfig = option(
        factory=ReferenceConfig,
        help="The frozen model of the KL terms, or the teacher of on-policy distillation.",
        only_for=Condition(
            lambda config, _: config.uses_reference or bool(config.reference.device_mapping),
            "neither use_kl_loss nor add_token_level_kl is on, so there is no reference",
            ("use_kl_loss", "add_token_level_kl", "use_opd", "adv_estimator"),
        ),
    )
    critic: CriticConfig = option(
        factory=CriticConfig,
        help="The value model of adv_estimator gae.",
        only_for=Condition(
            lambda config, _: config.uses_critic or bool(config.critic.device_mapping),
            "adv_estimator is not gae, so there is no critic",
            ("adv_estimator",),
        ),
    )
    rollout_dump_dir: str | None = option(
        None,
        "Folder for the samples of steps: ids, log-probs, versions, scores and advantages, one parquet file a step; "
        "`roll show`, `roll report` and `roll explain` read them. Default: output_dir/samples.",
    )
    rollout_dump_steps: int | None = option(
        10,
        "Newest steps whose samples are kept in rollout_dump_dir; null keeps all steps, 0 writes none. Default: all "
        "where rollout_dump_dir is given.",
        ge=0,
    )
    rollout_dump_every: int | None = option(
        None,
        "The samples of every so many steps are kept too, beside those of the newest steps, of the first, and of those "
        "with the largest actor/grad_norm and correction/behavior_k3. Default: a tenth of max_steps.",
        ge=1,
        usual=(1, 1e6),
        only_for=needs("rollout_dump_steps", "rollout_dump_steps keeps all steps, or none"),
    )
    ppo_epochs: int = option(1, "Passes over each batch.", ge=1, usual=(1, 100))
    mean_logprob_mismatch: float | None = option(
        None,
        "Bound on the mean difference between the log-probs of engine and trainer before the first update; null leaves "
        "it out. Default: in fp32 1.5 eps layers^0.75 sqrt(hidden_size) log2(sequence_length), on GPUs at least 1e-4; "
        "in half precision 2 eps layers^0.75, at least 0.15.",
        gt=0,
        usual=(1e-8, 100.0),
    )
    p99_logprob_mismatch: float | None = option(
        None,
        "As mean_logprob_mismatch, a bound on the difference of 99 % of tokens. Default: 10 times the default of the "
        "mean, in half precision 5 times.",
        gt=0,
        usual=(1e-8, 100.0),
    )
    max_logprob_mismatch: float | None = option(
        None,
        "As mean_logprob_mismatch, a bound on the largest difference. Default: in fp32 100 times the default of the "
        "mean; none in half precision.",
        gt=0,
        usual=(1e-8, 1000.0),
    )

    def steps_per_batch(self, role: TrainedRoleConfig) -> int:
        """Optimizer steps of a role in one training step, over all `ppo_epochs`."""
        return super().steps_per_batch(role) * self.ppo_epochs

    def trained_roles(self) -> dict[str, TrainedRoleConfig]:
        return super().trained_roles() | ({"critic": self.critic} if self.uses_critic else {})

    def schedule_steps(self, role: TrainedRoleConfig) -> int:
        """Optimizer steps of a role's learning-rate schedule; the policy's begins after `critic_warmup`."""
        waits = self.critic_warmup if self.uses_critic and isinstance(role, ActorTrainConfig) else 0
        return max(1, self.max_steps - waits) * self.steps_per_batch(role)

    @property
    def policy(self) -> PolicySettings:
        """The settings of the policy loss."""
        variant = self.actor_train.pg_variant
        source = proximal_source(self, variant, self.async_generation_ratio)
        base = ratio_base(self, variant, source)
        return part(PolicySettings, self, pg_variant=variant, old_log_probs_source=source, pg_ratio_base=base)

    @property
    def advantages(self) -> AdvantageSettings:
        return part(AdvantageSettings, self)

    @property
    def uses_reference(self) -> bool:
        """Whether a KL term needs the frozen model, or a teacher is one."""
        return self.use_kl_loss or self.add_token_level_kl or self.uses_teacher

    @property
    def uses_critic(self) -> bool:
        return self.estimator.needs == "values"

    @property
    def critic_apart(self) -> bool:
        """Whether the critic has its own devices, so that it works at the same time as actor_train."""
        return self.uses_critic and set(self.critic.device_mapping).isdisjoint(self.actor_train.device_mapping)


@dataclass
class RLConfig(LearnerOptions, RolloutOptions, EngineOptions, BaseConfig):
    """The keys of reinforcement learning, shared by RLVR and agents."""

    is_num_return_sequences_expand: bool = option(True, "Each sample is a separate request with its own seed.")
    is_offload_states: bool | None = option(
        None,
        "Trainer and engines that share devices take turns on them: what is not in use is moved to host "
        "memory, or freed. Default: true on GPUs, false on a CPU. Needs a ratio of 0.",
    )
    on_truncated_sampling: Literal["replay", "warn", "refuse"] = option(
        "replay",
        "What to do about a top_p or top_k that truncates the sampled distribution. `replay`: the engine returns "
        "which tokens were kept, and all log-probs, those of the trainer too, are over these alone, so that ratios and "
        f"KL are those of the policy that sampled; needs a top_k from 2 to {LONGEST_SAMPLING_MASK}, else as `warn`.",
    )

    @property
    def samples_per_batch(self) -> int:
        return self.rollout_batch_size * self.num_return_sequences_in_group

    @property
    def filled_samples_per_batch(self) -> int:
        """Samples of one step and the masked ones that fill up its last optimizer step of actor_train."""
        step = self.actor_train.samples_per_optimizer_step
        return -(-self.samples_per_batch // step) * step

    @property
    def responses_per_group(self) -> int:
        """Responses generated for one group: its samples, and a greedy one if the advantages need it."""
        return self.num_return_sequences_in_group + self.uses_greedy_responses

    @property
    def samples_multiple(self) -> int:
        """Batches are padded to a multiple of this many samples, so that they fill the optimizer steps of all roles.

        Of several policies, whose optimizer steps have all of their samples, those of each are.
        """
        if self.policies:
            return self.actor_train.layout.data
        return math.lcm(*(role.samples_per_optimizer_step for role in self.trained_roles().values()))

    @property
    def requests_per_engine(self) -> int:
        """Maximum number of requests of one engine at a time, rounded up."""
        return -(-self.groups_per_batch * self.responses_per_group // self.actor_infer.layout.data)

    @property
    def uses_greedy_responses(self) -> bool:
        return self.estimator.needs == "baselines"

    @property
    def shares_devices(self) -> bool:
        return not set(self.actor_train.device_mapping).isdisjoint(self.actor_infer.device_mapping)

    def takes_turns(self, platform: str) -> bool:
        """Whether they hold memory of these devices in turns, on `platform`, cpu or cuda."""
        wanted = platform == "cuda" if self.is_offload_states is None else self.is_offload_states
        return wanted and self.shares_devices and self.async_generation_ratio == 0

    def adapters(self, platform: str) -> dict[str, LoraArguments] | None:
        """The adapters that engines get instead of weights, by policy."""
        model, way = self.actor_train.model_args, self.actor_train.lora_update
        usual = (platform == "cuda" or merging_rounds(self)) and not without_base(self, platform)
        sent = way == "adapter" or (way == "auto" and (usual or bool(self.policies)))
        return {**by_policy(model, self.policies)} if sent and model.trains_adapters else None

    def keeps_engines(self, platform: str) -> bool:
        """Whether engines keep their memory on GPUs that they share with the trainer."""
        return platform == "cuda" and self.shares_devices and not self.takes_turns(platform)

    @property
    def replays_sampling_mask(self) -> bool:
        """Whether log-probs are over the tokens that `top_p` and `top_k` kept, which the engine returns."""
        top_k = self.actor_infer.generating_args.top_k
        return self.on_truncated_sampling == "replay" and 1 < top_k <= LONGEST_SAMPLING_MASK

    @property
    def replays_routing(self) -> bool:
        """Whether tokens are trained with the experts that they were sampled with, which the engine returns."""
        return self.actor_train.router_replay.engine_records

    @property
    def default_max_staleness(self) -> int:
        return max(DEFAULT_MAX_STALENESS, versions_ahead(self.async_generation_ratio))


REWARD_MODEL_USED = Condition(
    lambda config, _: config.uses_reward_model or bool(config.reward.device_mapping),
    "no reward is a reward_model, so there is no such model",
    ("rewards",),
)


@dataclass
class RLVRConfig(RLConfig):
    """Reinforcement learning with verifiable rewards."""

    pipeline: Literal["rlvr"] = option("rlvr", "Which pipeline this file is for.")
    rewards: dict[str, RewardConfig] = option(
        factory=lambda: {"math_rule": RewardConfig()},
        help="Rewards by name. One whose name is that of a built-in reward uses it, unless `function` is given.",
    )
    reward: RewardModelRoleConfig = option(
        factory=RewardModelRoleConfig,
        help="The frozen model of a reward whose function is reward_model.",
        only_for=REWARD_MODEL_USED,
    )
    judge: JudgeConfig = option(
        factory=JudgeConfig,
        help="The engines of a reward whose function is llm_judge and that has no endpoint.",
        only_for=Condition(
            lambda config, _: config.uses_judge or bool(config.judge.device_mapping),
            "no reward is an llm_judge without base_url, so there is no such model",
            ("rewards",),
        ),
    )

    @property
    def uses_reward_model(self) -> bool:
        return any(scoring_role(reward) == "reward" for reward in self.rewards.values())

    @property
    def uses_judge(self) -> bool:
        return any(scoring_role(reward) == "judge" for reward in self.rewards.values())

    @property
    def advantages(self) -> AdvantageSettings:
        """The settings of the advantages; weights of rewards are for estimators that read each of them."""
        weights = [reward.weight for reward in self.rewards.values()] if self.uses_reward_parts else []
        return part(AdvantageSettings, self, reward_weights=tuple(weights))


@dataclass
class RLVREngineRewardConfig(RLVRConfig):
    """Pipeline rlvr where `reward.strategy_args.strategy_name` is sglang: engines score with the reward model."""

    reward: RewardEngineConfig = option(  # type: ignore[assignment]  # what reads either kind reads its common keys
        factory=RewardEngineConfig,
        help="The engines of a reward whose function is reward_model.",
        only_for=REWARD_MODEL_USED,
    )
