"""What a weight update sends, and what trainer and engines keep for it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from roll.base.text import gibibytes
from roll.configs.arguments import DTYPE_BYTES
from roll.configs.devices.megatron import stage_layers
from roll.configs.learning.lora import adapter_parameters
from roll.configs.pipeline import BaseConfig, RLConfig
from roll.configs.roles import TrainedRoleConfig
from roll.models.families.frozen import frozen_names, frozen_parameters
from roll.models.families.shape import ModelShape
from roll.models.families.weights import target_rules
from roll.plan.batch_lines import Line


def sent_weights(worker: TrainedRoleConfig, shape: ModelShape, stage: int, layers: Sequence[int]) -> int:
    """Weights of a stage that training changes, on all its ranks; `layers` has the number of layers of each stage."""
    model = worker.model_args
    if model.trains_adapters:  # which are added to these
        return layers[stage] * sum(rule.count(shape) for rule, _ in target_rules(shape.family.layer, model.lora_target))
    count = shape.stage_parameters(stage, layers, 1) + shape.expert_parameters(stage, layers, 1, 1)
    with contextlib.suppress(ValueError):  # of a wrong freeze_module_prefix, which a check reports
        if frozen := frozen_names(shape, model.freeze_module_prefix):
            count -= frozen_parameters(shape, frozen, stage, layers, 1)
    return count


def kept_bytes(config: BaseConfig, worker: TrainedRoleConfig, shape: ModelShape, stage: int) -> tuple[int, str]:
    """Bytes that the rank which sends a stage keeps of the last update, and their formula; 0 without deltas."""
    if not isinstance(config, RLConfig) or worker is not config.actor_train or config.weight_update == "full":
        return 0, ""
    count = sent_weights(worker, shape, stage, stage_layers(shape.layers, worker.strategy_args.strategy_config))
    size = DTYPE_BYTES[worker.model_args.dtype]
    return count * size, f"{count:,} weights of the stage x {size} B, on the rank that sends them"


def update_lines(config: BaseConfig, shapes: Mapping[str, ModelShape], platform: str) -> list[Line]:
    """Bytes of a weight update after the first, which sends all weights, on `platform`, cpu or cuda."""
    if not isinstance(config, RLConfig) or "actor_train" not in shapes:
        return []
    worker, shape, name = config.actor_train, shapes["actor_train"], "weight update"
    model, size = worker.model_args, DTYPE_BYTES[worker.model_args.dtype]
    if (adapters := config.adapters(platform)) is not None:
        count = sum(adapter_parameters(shape, each, shape.layers) for each in adapters.values())
        return [Line(name, gibibytes(count * size), f"{count:,} parameters of adapters x {size} B")]
    count = sent_weights(worker, shape, 0, [shape.layers])
    formula = f"{count:,} weights{' of layers with adapters' if model.trains_adapters else ''} x {size} B"
    if config.weight_update == "delta":
        return [Line(name, f"at most {gibibytes(count * size)}", f"{formula}, if all of them change")]
    return [Line(name, gibibytes(count * size), formula)]
