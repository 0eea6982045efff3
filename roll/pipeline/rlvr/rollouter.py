"""The rollouter of an RLVR run, made where it runs: in the driver, or in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll.configs.pipeline import RLVRConfig
from roll.datasets.templates import EncodedPrompt
from roll.pipeline.engine_pool import EnginePool
from roll.pipeline.extensions import load_extensions
from roll.pipeline.rlvr.groups import Group
from roll.pipeline.rlvr.producer import RLVRProducer
from roll.pipeline.rlvr.scoring import Scorer
from roll.pipeline.rollout_settings import policy_settings, rollout_options
from roll.pipeline.rollouter import Rollouter
from roll.pipeline.tokenizer import load_tokenizer
from roll.rollout.types import SamplingParams

if TYPE_CHECKING:
    from roll.distributed.infer_worker import EngineClient


@dataclass(frozen=True)
class RolloutInputs:
    """What a rollouter is made of; can be sent to another process.

    Attributes:
        config: of the run.
        prompts: to train on, encoded.
        validation_prompts: encoded.
        sampling: of training samples.
        validation_sampling: of validation.
    """

    config: RLVRConfig
    prompts: list[EncodedPrompt]
    validation_prompts: list[EncodedPrompt]
    sampling: SamplingParams
    validation_sampling: SamplingParams


def make_rollouter(inputs: RolloutInputs, engines: EngineClient, scorer: Scorer | None = None) -> Rollouter[Group]:
    """A rollouter that asks these engines; without a scorer it starts the rewards itself."""
    config = inputs.config
    if scorer is None:
        scorer = Scorer(config.rewards, load_tokenizer(config.actor_train.model_args.model_name_or_path))
    pool = EnginePool(engines, config.max_generation_retries, config.actor_infer.max_running_requests)
    producer = RLVRProducer(
        config,
        inputs.prompts,
        inputs.validation_prompts,
        pool,
        scorer,
        inputs.sampling,
        inputs.validation_sampling,
    )
    samples = config.num_return_sequences_in_group
    rollouter = load_extensions(config).rollouter or Rollouter
    return rollouter(
        producer, policy_settings(config, config.rollout_batch_size, samples), rollout_options(config, samples)
    )
