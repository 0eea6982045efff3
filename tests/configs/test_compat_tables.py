"""The migration tables and docs/coming_from.md agree and name keys that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from roll.base.schema import known_keys, value_at
from roll.configs.agentic import AgenticConfig
from roll.configs.compat.apply import MIGRATION, MOVED_KEYS, RENAMED_KEYS, SHORT_NAMES, UNSUPPORTED_KEYS
from roll.configs.compat.async_trainers import KIND, WEIGHT_RANGE, WEIGHT_SWITCH
from roll.configs.compat.recipe import Recipe
from roll.configs.compat.verl import NAMES, VERL_KEYS
from roll.configs.compat.verl_correction import read_rollout_correction
from roll.configs.load import PIPELINES
from roll.configs.pipeline import DPOConfig, RLVRConfig
from roll.configs.sglang_options import server_options
from tests.configs.samples import DPO_KEYS, READ_KEYS, refusal

PAGE = Path(__file__).parents[2] / "docs" / "coming_from.md"
ENGINE = "actor_infer.strategy_args.strategy_config."


def rows(head: str = "there") -> list[list[str]]:
    """Cells of every row of the tables whose first heading is `head`, without headings."""
    found: list[list[str]] = []
    inside = False
    previous = ""
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and not previous.startswith("|"):
            inside = cells[0] == head
        elif line.startswith("|") and inside and not line.startswith("|---"):
            found.append(cells)
        previous = line
    return found


def test_every_key_of_the_migration_tables_exists() -> None:
    known = {key.path for cls in (RLVRConfig, AgenticConfig, DPOConfig) for key in known_keys(cls)}
    known |= {re.sub(r"^actor_train", "<role>", path) for path in known}
    known |= {f"{ENGINE}{name}" for name in server_options() or ()}
    named = [key for row in rows() for key in re.findall(r"`([^`]+)`", row[1])]
    assert len(named) > 100
    assert [key for key in named if key not in known] == []


def is_read(name: str) -> bool:
    """Whether a key of another framework is known or answered without the data."""
    if name == KIND:
        return True
    keys = [key.path for cls in (RLVRConfig, AgenticConfig) for key in known_keys(cls)]
    own = {"worker_cls", *(path.rpartition(".")[2] for path in keys if not path.startswith("rewards."))}
    others = MOVED_KEYS.keys() - VERL_KEYS.keys()
    moved = {*RENAMED_KEYS, *others, *(path.rpartition(".")[2] for path in others), WEIGHT_SWITCH, WEIGHT_RANGE}
    if any(f".{path}".endswith(f".{name}") for path in VERL_KEYS if not path.endswith(tuple(NAMES))):
        return True
    return name in {*own, *moved, *READ_KEYS, *DPO_KEYS} or any(
        item.matches(path) for item in UNSUPPORTED_KEYS for path in (name, f"actor_train.{name}")
    )


def reported() -> dict[str, set[str]]:
    """Keys here of every name in the tables that is neither known nor a value or file."""
    pairs: dict[str, set[str]] = {}
    for other, own, _ in rows():
        names = [text.partition(":")[0].lstrip("-").replace("-", "_") for text in re.findall(r"`([^`]+)`", other)]
        names = [name.removeprefix("rewards.<name>.").removeprefix("validation.") for name in names]
        ours = re.findall(r"`([^`]+)`", own)
        for index, name in enumerate(names):
            if not is_read(name) and name not in ("fp16", "mse", "train.py", "train_async.py"):
                pairs[name] = {ours[index]} if len(ours) == len(names) else set(ours)
    return pairs


def test_page_and_tables_agree() -> None:
    assert {name: set(keys) for name, keys in MIGRATION.items() if name not in SHORT_NAMES} == reported()


@pytest.mark.parametrize(
    ("override", "message"),
    {
        "num_generations=4": "num_generations: unknown key; here that is num_return_sequences_in_group",
        "beta=0.1": "beta: unknown key; here that is use_kl_loss and kl_loss_coef (docs/coming_from.md)",
        "--eps-clip=0.1": "--eps-clip: unknown key; here that is pg_clip_low",
        "max_tokens_per_gpu=1": "here that is actor_train.max_tokens_per_microbatch_in_train",
        "train_batch_size=1": "train_batch_size: unknown key; here that is rollout_batch_size",
        "num_train_epochs=3": "num_train_epochs: unknown key; here that is max_steps (epochs x rows of the data / rows",
        "trainer.total_epochs=1": "trainer.total_epochs: unknown key; here that is max_steps (epochs x rows of",
        "actor.clip_ratio=0.2": "here that is pg_clip_low and pg_clip_high",
        "actor.optim.lr=1": "here that is actor_train.training_args.learning_rate",
        "actor.policy_loss.loss_mode=vanilla": "pg_variant (vanilla there is ppo here; docs/coming",
        "delta=4": "here that is dual_clip_loss and dual_clip_c",
        "off_policy_mask_threshold=0.5": "here that is correction.opsm_delta",
        "data.custom_cls.path=x": "data.custom_cls.path: unknown key; docs/coming_from.md lists the keys of data that",
        "trainer.mode=x": "trainer.mode: unknown key; docs/coming_from.md lists the keys of trainer that are read",
        "lr=1": "lr: unknown key; here that is actor_train.training_args.learning_rate",
        "actor_train.training_args.lr=1": "here that is actor_train.training_args.learning_rate",
        "critic.lr=1": "here that is critic.training_args.learning_rate",
        "batch_size=8": "here that is rollout_batch_size and actor_train.training_args.per_device_train_batch_size",
        "epochs=3": "epochs: unknown key; here that is max_steps (epochs x rows of the data / rows of a batch)",
        "resume=true": "resume: unknown key; here that is resume_from_checkpoint",
        "model=x": "model: unknown key; here that is pretrain",
        "reference.model=x": "here that is reference.model_args.model_name_or_path",
        "reward_weights=[1,2]": "here that is rewards.<name>.weight",
        "rollout.val_kwargs.top_p=1": "here that is validation.generating_args.top_p",
        "actor_rollout_ref.rollout.nnodes=1": "rollout.nnodes: unknown key; here that is actor_infer.device_mapping",
        "rollout.val_kwargs.n=1": "here that is validation.generating_args (",
        "actor_learning_rate=1": "here that is actor_train.training_args.learning_rate",
        "micro_train_batch_size=1": "here that is actor_train.training_args.per_device_train_batch_size",
        "generate_max_len=9": "here that is response_length",
        "datasets=[x]": "here that is actor_train.data_args.file_name",
        "evaluation_strategy=steps": "here that is eval_steps",
        "val_before_train=true": "here that is eval_steps (above 0 it runs before step 1 too)",
        "ref_model=x": "here that is reference.model_args.model_name_or_path",
        "kl_estimator=k3": "here that is kl_loss_type and kl_penalty",
        "pref_loss=x": "here that is dpo_loss_type, of pipeline dpo",
        "stage=ppo": "here that is pipeline (rlvr, agentic, sft, dpo or reward_model)",
        "chat_template=x": "here that is actor_train.data_args.template",
        "flash_attn=fa2": "here that is actor_train.model_args.attn_implementation",
        "packing=true": "here that is actor_train.use_sequence_packing",
        "do_sample=true": "here that is actor_infer.generating_args.temperature (0 is greedy, in validation)",
        "vllm_num_engines=2": "here that is actor_infer.device_mapping (num_gpus_per_worker devices each)",
        "colocate_all_models=true": "here that is actor_infer.device_mapping (equal device mappings share devices)",
        "offload=true": "strategy_config.optimizer_cpu_offload",
        "optimizer=adamw": "here that is actor_train.training_args (the optimizer is Adam",
        "push_to_hub=true": "here that is save_hf_model (the model is exported",
        "finetuning_type=lora": "not available here: LoRA (finetuning_type lora)",
        "adapter=qlora": "not available here: LoRA (adapter qlora)",
        "load_in_4bit=true": "not available here: quantised training (load_in_4bit)",
        "quantization_bit=4": "not available here: quantised training (quantization_bit 4)",
        "actor_infer.bf16=true": "here that is actor_infer.model_args.dtype",
    }.items(),
)
def test_key_of_another_framework_names_ours(tmp_path: Path, override: str, message: str) -> None:
    assert message in refusal(tmp_path, override)


@pytest.mark.parametrize(
    "override",
    [
        "base_url=http://127.0.0.1:8000/v1",
        "rollout_function=my_agent:run",
        "rollout_fn=my_agent:run",
        "agent_loop=my_agent",
        "agent_loop.name=my_agent",
        "rollout.agent.num_workers=4",
        "agent_cls=my_agent.Agent",
        "--custom-generate-function-path=my_agent.generate",
        "multi_turn=true",
        "openai_base_url=http://127.0.0.1:8000/v1",
        "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
    ],
)
def test_agents_that_call_an_endpoint_are_told_of_environments(tmp_path: Path, override: str) -> None:
    answer = refusal(tmp_path, "pipeline=agentic", override)
    assert "TextEnv (docs/environments.md)" in answer and "did you mean" not in answer and "belongs at" not in answer


def test_every_row_has_three_cells() -> None:
    assert [row for row in rows() if len(row) != 3] == []


def test_every_moved_key_is_on_the_page() -> None:
    shown = {name for row in rows() for name in re.findall(r"`([^`]+)`", row[0])}
    moved = {path.rpartition(".")[2] for path in MOVED_KEYS.keys() - VERL_KEYS.keys()}
    assert moved <= shown
    ends = tuple(f".{name}" for name in shown)
    single = [path for path in VERL_KEYS if ".megatron." not in path and ".val_kwargs." not in path]
    assert len(single) > 50 and [path for path in single if not f".{path}".endswith(ends)] == []
    assert {"num_gpus_per_node", "batch_timeout", "batch_generation_interval"} <= shown & set(RENAMED_KEYS)


def test_the_defaults_of_the_page_are_those_of_the_code() -> None:
    table = rows("key")
    assert len(table) > 20 and {len(row) for row in table} == {6}
    here = {row[0].strip("`"): yaml.safe_load(row[1].strip("`")) for row in table}
    assert here == {path: value_at(RLVRConfig(), path) for path in here}


def test_the_rejections_of_the_page_are_those_that_a_file_in_verls_spelling_gets() -> None:
    table = rows("`rollout_rs`, `rollout_rs_threshold`")
    assert len(table) >= 6
    for given, ours in table:
        option, threshold = re.findall(r"`([^`]+)`", given)
        keys = {"rollout_rs": option, "rollout_rs_threshold": yaml.safe_load(threshold)}
        recipe = Recipe({"algorithm": {"rollout_correction": keys}})
        read_rollout_correction(recipe)
        assert not recipe.problems
        assert recipe.get("correction.rejection") == yaml.safe_load(ours.strip("`"))


def test_no_unsupported_key_hides_a_key_that_exists() -> None:
    for name, root in PIPELINES.items():
        paths = [key.path.replace("<name>", "any") for key in known_keys(root)]
        hidden = [
            (path, item.pattern)
            for item in UNSUPPORTED_KEYS
            for path in paths
            if name in item.pipelines and item.matches(path)
        ]
        assert hidden == []
