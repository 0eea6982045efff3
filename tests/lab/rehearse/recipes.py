"""Recipes of any size as mappings, for the properties of their rehearsals, and a small model that they can take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from roll.lab.rehearse.model import SHAPE
from roll.models.families.registry import family_named
from tests.configs.samples import MODEL


def write_small_config(folder: Path, family: str = "qwen2") -> str:
    """The config.json of a rehearsal's model, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    known = family_named(family)
    values = SHAPE | dict(known.rehearsal.shape) | {"vocab_size": 270, "max_position_embeddings": 32768}
    values["architectures"] = [known.architecture]
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


@st.composite
def megatron(draw: st.DrawFn, strategy: str = "megatron_train") -> tuple[dict[str, Any], int]:
    """A role that runs Megatron, and its number of devices."""
    tensor, pipeline = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    data = draw(st.integers(1, 3))
    options = {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "sequence_parallel": tensor > 1 and draw(st.booleans()),
    }
    role: dict[str, Any] = {"strategy_args": {"strategy_name": strategy, "strategy_config": options}}
    if draw(st.booleans()):
        role["model_args"] = {"dtype": draw(st.sampled_from(["bf16", "fp32"])), "attn_implementation": "fa2"}
        options["apply_rope_fusion"] = role["model_args"]["dtype"] == "bf16"
    if draw(st.booleans()):
        role |= {"use_dynamic_batching_in_infer": True, "max_tokens_per_microbatch_in_infer": 20000}
    return role, tensor * pipeline * data


@st.composite
def reinforcement(draw: st.DrawFn, group_samples: int, batch_unit: int) -> dict[str, Any]:
    """What RLVR and agents share: roles with their devices, a batch that fills optimizer steps, and a schedule.

    Args:
        draw: of hypothesis.
        group_samples: samples of one group.
        batch_unit: groups per entry of `rollout_batch_size`, 1 in RLVR.
    """
    train, devices = draw(megatron())
    size, accumulation = draw(st.integers(1, 8)), draw(st.sampled_from([1, 2, 3, 8, 64]))
    train["training_args"] = {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": accumulation,
        "warmup_steps": draw(st.sampled_from([0, 1, 10])),
    }
    options = train["strategy_args"]["strategy_config"]
    ranks = options["tensor_model_parallel_size"] * options["pipeline_model_parallel_size"]
    groups = draw(st.integers(1, 5)) * size * accumulation * (devices // ranks)
    engine, engines = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 12))
    colocated = draw(st.booleans()) and devices % engine == 0
    count = devices if colocated else engine * engines
    train_first = draw(st.booleans())
    offset = 0 if colocated or train_first else count
    train["device_mapping"] = list(range(offset, offset + devices))
    start = offset if colocated else (devices if train_first else 0)
    tree: dict[str, Any] = {
        "pretrain": MODEL,
        "platform": "cuda",
        "rollout_batch_size": groups * batch_unit,
        "ppo_epochs": draw(st.integers(1, 2)),
        "max_steps": draw(st.integers(1, 1000)),
        "async_generation_ratio": draw(st.sampled_from([0, 1, 2.5])),
        "eval_steps": draw(st.sampled_from([0, 10])),
        "actor_train": train,
        "actor_infer": {
            "num_gpus_per_worker": engine,
            "device_mapping": list(range(start, start + count)),
            "strategy_args": {"strategy_config": {"mem_fraction_static": 0.8, "load_format": "dummy"}},
            "max_running_requests": draw(st.integers(1, 512)),
        },
    }
    if draw(st.booleans()):
        tree |= {"use_kl_loss": True, "kl_loss_coef": 0.1, "reference": {}}
        tree["reference"], own = draw(megatron("megatron_infer"))
        end = max(train["device_mapping"][-1], start + count - 1) + 1
        options = tree["reference"]["strategy_args"]["strategy_config"]
        own_ranks = options["tensor_model_parallel_size"] * options["pipeline_model_parallel_size"]
        shared = devices % own_ranks == 0 and draw(st.booleans())
        tree["reference"]["device_mapping"] = train["device_mapping"] if shared else list(range(end, end + own))
    return tree


@st.composite
def rlvr_recipes(draw: st.DrawFn) -> dict[str, Any]:
    """An RLVR recipe that loads."""
    group = draw(st.sampled_from([1, 2, 3, 8, 16]))
    tree = draw(reinforcement(group_samples=group, batch_unit=1))
    tree |= {
        "pipeline": "rlvr",
        "adv_estimator": "reinforce",
        "num_return_sequences_in_group": group,
        "prompt_length": draw(st.integers(1, 4000)),
        "response_length": draw(st.integers(1, 8000)),
    }
    tree["actor_train"]["data_args"] = {"file_name": ["train.jsonl"]}
    tree["validation"] = {"data_args": {"file_name": ["val.jsonl"]}, "generating_args": {"num_return_sequences": 4}}
    if draw(st.booleans()):
        tree["rewards"] = {
            "math": {"tag_included": ["math", "geometry"], "world_size": 8},
            "code": {"tag_included": ["code"], "query_filter_config": {"type": "std_filter"}}
            if group > 1
            else {"tag_included": ["code"]},
        }
    if draw(st.booleans()):
        tree["actor_infer"]["generating_args"] = {"max_new_tokens": tree["response_length"]}
        tree["async_training"] = {"max_queue_size": tree["rollout_batch_size"] * group * 4}
    return tree


@st.composite
def agentic_recipes(draw: st.DrawFn) -> dict[str, Any]:
    """A recipe of agents that loads."""
    group = draw(st.sampled_from([2, 3, 8]))
    tree = draw(reinforcement(group_samples=group, batch_unit=group))
    tags = draw(st.sampled_from([["Lake"], ["Lake", "Room"], ["Lake", "Room", "Sums"]]))
    kinds = {"Lake": "frozen_lake", "Room": "sokoban", "Sums": "calculator"}
    groups = tree["rollout_batch_size"] // group
    tree |= {
        "pipeline": "agentic",
        "sequence_length": draw(st.integers(2000, 9000)),
        "max_tokens_per_step": draw(st.integers(1, 400)),
        "sample_by": draw(st.sampled_from(["traj", "step"])),
        "custom_envs": {tag: {"env_type": kinds[tag]} for tag in tags},
        "train_env_manager": {
            "num_env_groups": groups * len(tags),
            "group_size": group,
            "group_size_redundancy": draw(st.integers(0, 2)),
            "tags": tags,
            "num_groups_partition": [groups] * len(tags),
            "max_env_num_per_worker": draw(st.sampled_from([0, 1, 16])),
        },
        "val_env_manager": {"group_size": 1, "tags": tags, "num_env_groups": len(tags)},
        "val_batch_size": 64,
    }
    tree["custom_envs"]["Lake"]["max_steps"] = draw(st.integers(1, 30))
    tree["max_actions_per_traj"] = draw(st.integers(5, 20))
    return tree


@st.composite
def sft_recipes(draw: st.DrawFn) -> dict[str, Any]:
    """A recipe of supervised fine-tuning that loads."""
    train, devices = draw(megatron())
    train["training_args"] = {
        "per_device_train_batch_size": draw(st.integers(1, 64)),
        "gradient_accumulation_steps": draw(st.integers(1, 8)),
    }
    train |= {"device_mapping": list(range(devices)), "data_args": {"file_name": ["train.jsonl"]}}
    steps = draw(st.sampled_from([0, 5]))
    return {
        "pipeline": "sft",
        "pretrain": MODEL,
        "platform": "cuda",
        "prompt_length": draw(st.integers(1, 4000)),
        "response_length": draw(st.integers(1, 4000)),
        "eval_steps": steps,
        "actor_train": train,
        "validation": {"data_args": {"file_name": ["val.jsonl"]}},
        **({"target_loss": 0.3} if steps else {}),
    }
