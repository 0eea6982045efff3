"""Options under Megatron's names are accepted by Megatron's own configs, and mean there what the plan says."""

from __future__ import annotations

import random
import subprocess
import sys
import types
from dataclasses import fields
from typing import Any
from unittest.mock import patch

import pytest

from roll.configs.arguments import TrainingArguments
from roll.configs.devices.megatron import MegatronTrainConfig, part_layers, with_defaults

pytestmark = pytest.mark.integration

BY_ROLL = {"expert_model_parallel_size", "context_parallel_size", "use_distributed_optimizer"}
"""Options that every config below has anyway."""

CHOICES: dict[str, list[dict[str, Any]]] = {
    "tensor_model_parallel_size": [{"tensor_model_parallel_size": 2}],
    "sequence_parallel": [{"sequence_parallel": True, "tensor_model_parallel_size": 2}],
    "pipeline_model_parallel_size": [{"pipeline_model_parallel_size": 4}],
    "virtual_pipeline_model_parallel_size": [
        {"virtual_pipeline_model_parallel_size": 3, "pipeline_model_parallel_size": 4}
    ],
    "num_layers_in_first_pipeline_stage": [
        {"num_layers_in_first_pipeline_stage": 6, "pipeline_model_parallel_size": 4}
    ],
    "num_layers_in_last_pipeline_stage": [{"num_layers_in_last_pipeline_stage": 6, "pipeline_model_parallel_size": 4}],
    "account_for_embedding_in_pipeline_split": [
        {
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
            "pipeline_model_parallel_size": 2,
        }
    ],
    "account_for_loss_in_pipeline_split": [
        {"account_for_loss_in_pipeline_split": True, "pipeline_model_parallel_size": 5}
    ],
    "attention_backend": [{"attention_backend": name} for name in ("flash", "fused", "unfused")],
    "bias_activation_fusion": [{"bias_activation_fusion": value} for value in (True, False)],
    "bias_dropout_fusion": [{"bias_dropout_fusion": value} for value in (True, False)],
    "apply_rope_fusion": [{"apply_rope_fusion": value} for value in (True, False)],
    "overlap_grad_reduce": [{"overlap_grad_reduce": value} for value in (True, False)],
    "overlap_param_gather": [{"overlap_param_gather": value} for value in (True, False)],
    "gradient_accumulation_fusion": [{"gradient_accumulation_fusion": value} for value in (True, False)],
    "accumulate_allreduce_grads_in_fp32": [{"accumulate_allreduce_grads_in_fp32": False}],
    "recompute_granularity": [{"recompute_granularity": name} for name in ("full", "selective")],
    "recompute_method": [{"recompute_granularity": "full", "recompute_method": "block"}],
    "recompute_num_layers": [{"recompute_granularity": "full", "recompute_num_layers": 2}],
    "recompute_modules": [{"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}],
    "use_precision_aware_optimizer": [{"use_precision_aware_optimizer": True}],
    "main_params_dtype": [{"use_precision_aware_optimizer": True, "main_params_dtype": "fp16"}],
    "exp_avg_dtype": [{"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"}],
    "exp_avg_sq_dtype": [{"use_precision_aware_optimizer": True, "exp_avg_sq_dtype": "fp16"}],
    "optimizer_cpu_offload": [{"optimizer_cpu_offload": True}],
    "optimizer_offload_fraction": [{"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}],
    "overlap_cpu_optimizer_d2h_h2d": [{"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": False}],
    "cp_comm_type": [{"cp_comm_type": name, "context_parallel_size": 2} for name in ("p2p", "a2a")],
    "moe_token_dispatcher_type": [{"moe_token_dispatcher_type": name} for name in ("alltoall", "allgather")],
    "moe_aux_loss_coeff": [{"moe_aux_loss_coeff": 0.01}],
    "moe_z_loss_coeff": [{"moe_z_loss_coeff": 0.001}],
    "moe_grouped_gemm": [{"moe_grouped_gemm": value} for value in (True, False)],
    "expert_tensor_parallel_size": [
        {"expert_tensor_parallel_size": 1, "tensor_model_parallel_size": 2, "sequence_parallel": True}
    ],
}
"""Option -> sections that set it as a GPU with Transformer Engine would run them."""


OF_EXPERTS = {"moe_grouped_gemm", "expert_tensor_parallel_size", "moe_aux_loss_coeff", "moe_z_loss_coeff"}


def test_every_option_is_tried():
    assert {option.name for option in fields(MegatronTrainConfig)} == {*CHOICES, *BY_ROLL}


@pytest.mark.parametrize("program", ["accepted", "same_layers"])
def test_megatron_reads_options_as_they_are_meant(program):
    code = f"from tests.integration.test_megatron_options import {program}; {program}()"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def accepted() -> None:
    """Builds Megatron's configs of every choice, and finds the option's value in them."""
    _prepare()
    import torch

    from roll.distributed.train.megatron_model import BuildOptions, transformer_config
    from roll.distributed.train.megatron_optimizer import ddp_config, optimizer_config

    def built(**values: Any) -> dict[str, Any]:
        options = with_defaults(MegatronTrainConfig(**values), True, 2, True, False)
        build = BuildOptions(options, torch.bfloat16, transformer_engine=True)
        configs = [
            transformer_config(_model(24, mixture=not OF_EXPERTS.isdisjoint(values)), build),
            ddp_config(options),
            optimizer_config(TrainingArguments(), options, torch.bfloat16, pinned=True),
        ]
        return {key: value for config in configs for key, value in vars(config).items()}

    plain = built()
    on_by_default = ("overlap_grad_reduce", "overlap_param_gather", "bias_activation_fusion", "apply_rope_fusion")
    assert all(plain[name] is True for name in (*on_by_default, "bias_dropout_fusion", "bf16"))
    assert plain["gradient_accumulation_fusion"] is False and plain["optimizer_cpu_offload"] is False
    names = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    for name, choices in CHOICES.items():
        for values in choices:
            result = built(**values)
            theirs = "grad_reduce_in_fp32" if name == "accumulate_allreduce_grads_in_fp32" else name
            value = getattr(result[theirs], "name", result[theirs])
            wanted = values[name]
            assert value == (names.get(wanted, wanted) if isinstance(wanted, str) else wanted), (name, value)
    assert built(optimizer_cpu_offload=True)["use_precision_aware_optimizer"] is True


def same_layers() -> None:
    """Random splits: Megatron builds as many layers in each part of a stage, and refuses what `part_layers` refuses."""
    _prepare()
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    from roll.distributed.train.megatron_model import BuildOptions, transformer_config

    draw, counts = random.Random(5), {True: 0, False: 0}
    for _ in range(1000):
        layers, stages, virtual = draw.randint(1, 24), draw.choice([1, 2, 3, 4, 8]), draw.choice([None, None, 1, 2, 3])
        first, last = (draw.choice([None, None, 1, 2, 4]) for _ in range(2))
        options = MegatronTrainConfig(
            pipeline_model_parallel_size=stages,
            virtual_pipeline_model_parallel_size=virtual,
            num_layers_in_first_pipeline_stage=first,
            num_layers_in_last_pipeline_stage=last,
            account_for_embedding_in_pipeline_split=draw.random() < 0.2,
            account_for_loss_in_pipeline_split=draw.random() < 0.2,
        )
        try:
            ours: list[list[int]] | None = part_layers(layers, options)
        except ValueError:
            ours = None
        try:
            config = transformer_config(_model(layers), BuildOptions(options))
            parts: list[int | None] = list(range(virtual)) if (virtual or 1) > 1 and stages > 1 else [None]
            table = [[get_num_layers_to_build(config, part, stage) for part in parts] for stage in range(stages)]
            theirs = table if min(map(min, table)) > 0 and sum(map(sum, table)) == layers else None
        except (ValueError, AssertionError):
            theirs = None
        assert ours == theirs, (layers, options, ours, theirs)
        counts[ours is not None] += 1
    assert min(counts.values()) > 100, counts


def _model(layers: int, mixture: bool = False) -> Any:
    """A decoder's shape; only its layers matter here, and whether they have experts."""
    values: dict[str, Any] = {"layers": layers, "hidden": 64, "intermediate": 128, "heads": 4, "kv_heads": 2}
    family = types.SimpleNamespace(megatron={}, traits=types.SimpleNamespace(gelu=False))
    values |= {"head_dim": 16, "norm_epsilon": 1e-6, "query_scale": None, "family": family, "mixture": None}
    if mixture:
        sizes = {"experts": 4, "per_token": 2, "width": 32, "shared_width": 0}
        values["mixture"] = types.SimpleNamespace(**sizes, sparse=[True] * layers, normalised=True)
    return types.SimpleNamespace(**values)


def _prepare() -> None:
    """Megatron on this CPU, with what it asks of an installed Transformer Engine."""
    from roll.platforms import get_platform

    get_platform("cpu").prepare_megatron()
    import megatron.core.models.common.embeddings.rope_utils as rope
    import megatron.core.utils as utils
    from packaging.version import Version

    class FusedAdam:
        def __init__(self, master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype, use_decoupled_grad): ...

    engine = {name: types.ModuleType(name) for name in ("transformer_engine", "transformer_engine.pytorch")}
    engine["transformer_engine.pytorch.optimizers"] = types.SimpleNamespace(FusedAdam=FusedAdam)  # type: ignore
    patch.dict(sys.modules, engine).start()
    patch.object(utils, "_te_version", Version("2.11.0")).start()
    patch.object(rope, "fused_apply_rotary_pos_emb", object()).start()
