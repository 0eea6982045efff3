"""The kinds of runs, one file each, and the models that score samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll.configs.user_code import import_named

if TYPE_CHECKING:
    from roll.configs.pipeline import BaseConfig
    from roll.pipeline.parts import Pipeline

PIPELINE_CLASSES = {
    "AgenticConfig": "roll.pipeline.kinds.agentic:AgenticPipeline",
    "RLVRConfig": "roll.pipeline.kinds.rlvr:RLVRPipeline",
    "RLVREngineRewardConfig": "roll.pipeline.kinds.rlvr:RLVRPipeline",
    "SFTConfig": "roll.pipeline.kinds.sft:SFTPipeline",
    "DPOConfig": "roll.pipeline.kinds.dpo:DPOPipeline",
    "RewardModelConfig": "roll.pipeline.kinds.reward_model:RewardModelPipeline",
}
"""Class of a configuration -> the pipeline that assembles its run."""


def pipeline_of(config: BaseConfig) -> Pipeline:
    pipeline: Pipeline = import_named(PIPELINE_CLASSES[type(config).__name__], callable)[1](config)
    return pipeline
