"""The model of role `reward` as the process in which samples are scored calls it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from roll.configs.hub.names import local_model
from roll.configs.model_config import read_model_shape
from roll.configs.pipeline import RLVRConfig
from roll.configs.rewards import is_reward_model
from roll.configs.roles import RewardModelRoleConfig
from roll.datasets.collate import collate_scored
from roll.datasets.records import prefix_errors
from roll.distributed.protocol import DataProto
from roll.distributed.remote_call import ShardsClient
from roll.distributed.train_worker import TrainWorker
from roll.pipeline.learner import forward
from roll.pipeline.tokenizer import load_tokenizer
from roll.rewards.reward_model import RewardModelScorer


@dataclass(frozen=True)
class RewardModel:
    """The cluster of role `reward`; can be pickled.

    Attributes:
        client: calls its ranks.
        config: of the role.
    """

    client: ShardsClient[TrainWorker]
    config: RewardModelRoleConfig

    async def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """The value after the last token of each sequence of token ids.

        Raises:
            ClusterError: a rank failed or did not answer in time.
        """
        missing = max(0, self.client.layout.data - len(sequences))
        data = DataProto.from_dict(collate_scored([*sequences, *[sequences[-1]] * missing]))  # each rank has a sample
        data.meta_info["temperature"] = 1.0
        values = (await forward(self.client, TrainWorker.compute_values, data, self.config)).batch["values"]
        ends = torch.tensor([len(sequence) for sequence in sequences])
        scores: list[float] = values[torch.arange(len(sequences)), ends].tolist()
        return scores


def reward_model_scorers(config: RLVRConfig) -> dict[str, RewardModelScorer]:
    """The scorers of the rewards that are a reward_model, by their names; not connected to the model yet.

    Raises:
        RunError: the tokenizer of the model cannot be read.
        DatasetError: it lacks the chat template of a reward.
    """
    rewards = {name: reward for name, reward in config.rewards.items() if is_reward_model(reward)}
    if not rewards:
        return {}
    folder = config.reward.model_args.model_name_or_path
    tokenizer, longest = load_tokenizer(folder), longest_sequence(config.reward)
    scorers = {}
    for name, reward in rewards.items():
        with prefix_errors(f"rewards.{name} ({folder})"):
            assert reward.template is not None, "loading fills it in"
            scorers[name] = RewardModelScorer(tokenizer, reward.template, longest)
    return scorers


def longest_sequence(role: RewardModelRoleConfig) -> int | None:
    """Most tokens of a sequence that the model can score, with one more for the padding after it; None: any number."""
    shape = read_model_shape(local_model(role.model_args.model_name_or_path or ""), role.value_head)
    limits = [shape.max_positions if shape is not None else None]
    if role.forward_token_limit is not None:
        limits.append(role.forward_token_limit // role.layout.tensor * role.layout.tensor)
    known = [limit - 1 for limit in limits if limit]
    return min(known, default=None)
