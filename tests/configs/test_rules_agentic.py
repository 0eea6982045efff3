"""Messages of the rules of the agentic pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.configs.check import check
from roll.configs.environments import names_class
from tests.configs.samples import AGENTIC, agentic, refusal

TRAIN = "train_env_manager"
SAMPLING = "actor_infer.generating_args"

REFUSED = {
    # tags and environments
    f"{TRAIN}.tags=[Lake,Rom]": f"{TRAIN}.tags: 'Rom' is not in custom_envs; known: Lake, Room; did you mean Room?",
    f"{TRAIN}.tags=[Lake,Lake]": f"{TRAIN}.tags: contains Lake twice; list it once, with its share in num_groups_",
    "custom_envs.Lake.env_type=frozen_lak": "custom_envs.Lake.env_type: 'frozen_lak' is not an environment; did you "
    "mean frozen_lake? known: ",
    "custom_envs.Lake.env_config.sice=5": "custom_envs.Lake.env_config.sice: unknown key; did you mean size? known: ",
    "custom_envs.Lake.env_config.size=1": "custom_envs.Lake.env_config.size: 1 is too small; the least allowed is 2",
    "custom_envs.Lake.env_config.max_steps=5": "custom_envs.Lake.max_steps: 6 is not env_config.max_steps 5; keep one",
    "custom_envs.Room.env_config.max_steps=many": "custom_envs.Room.env_config.max_steps: 'many' is not a whole number",
    "custom_envs.Lake.max_stepz=5": "custom_envs.Lake.max_stepz: unknown key; did you mean custom_envs.Lake.max_steps?",
    "custom_envs.Lake.env_manager_cls=a.b.VLTrajEnvManager": "this recipe needs what is not available here: images "
    "(custom_envs.Lake.env_manager_cls VLTrajEnvManager)",
    "custom_envs.Lake.env_manager_cls=a.b.Mine": "custom_envs.Lake.env_manager_cls: 'a.b.Mine' "
    "is not available; known: traj, step, ...TrajEnvManager, ...StepEnvManager",
    "custom_envs.Lake.env_manager_cls=traj custom_envs.Room.env_manager_cls=step": "custom_envs.Room.env_manager_cls: "
    "step contradicts custom_envs.Lake.env_manager_cls traj; all samples are of one kind",
    "sample_by=step custom_envs.Room.env_manager_cls=traj": "traj contradicts sample_by step",
    "custom_envs.Lake.agent_template='{state}'": "custom_envs.Lake.agent_template: {state} is not a field; known: "
    "{turn_idx}, {observation}, {actions_left}, {max_response_length}, {env_instruction}",
    "custom_envs.Lake.agent_system_template='{observation}'": "agent_system_template: {observation} is not a field",
    # groups
    f"{TRAIN}.num_groups_partition=[6,3]": f"{TRAIN}.num_groups_partition: [6, 3] adds up to 9, but num_env_groups is "
    "8; use the same for both",
    f"{TRAIN}.num_groups_partition=[8]": f"{TRAIN}.num_groups_partition: [8] has 1 part(s) for 2 tag(s), Lake, Room",
    f"{TRAIN}.num_groups_partition=[8,0]": "[8, 0] leaves a tag without groups; use at least 1 each, or remove",
    f"{TRAIN}.num_groups_partition=[] {TRAIN}.num_env_groups=9": f"{TRAIN}.num_groups_partition: is not given, and "
    "num_env_groups 9 does not divide into equal parts for 2 tags; use num_env_groups 8 or 10, or write the parts",
    f"{TRAIN}.group_size=1": f"{TRAIN}.group_size: 1 gives every sample of grpo advantage 0, so nothing is learned; "
    "use at least 2, or adv_estimator reinforce",
    "rollout_batch_size=65": f"rollout_batch_size: 65 trajectories are not whole groups of {TRAIN}.group_size 4; use "
    "64 or 68",
    "rollout_batch_size=3": "3 trajectories are not whole groups of train_env_manager.group_size 4; use 4",
    "val_batch_size=9 val_env_manager.group_size=2": "val_batch_size: 9 trajectories are not whole groups of "
    "val_env_manager.group_size 2; use 8 or 10",
    f"{TRAIN}.max_traj_per_env=3": f"{TRAIN}.max_traj_per_env: 3 is not one of -1",
    "adv_estimator=gae critic.device_mapping=[0,1,2,3] whiten_rewards=true": "whiten_rewards: true would scale the "
    "score of a trajectory but not the rewards of its turns",
    "adv_estimator=remax": "adv_estimator: remax needs a greedy response to each prompt, which agents of several turns "
    "do not generate; use grpo or rloo, or reinforce where train_env_manager.group_size is 1",
    "adv_estimator=gdpo": "adv_estimator: gdpo normalises each of several rewards of a response, and an environment "
    "gives one; use grpo or rloo",
    # samples and lengths
    "num_return_sequences_in_group=8": "num_return_sequences_in_group: 8 is not train_env_manager.group_size 4; leave",
    f"{SAMPLING}.num_return_sequences=4": f"{SAMPLING}.num_return_sequences: 4 is not 1: a turn has one text; write "
    "train_env_manager.group_size",
    "validation.generating_args.num_return_sequences=2": "2 is not 1: a turn has one text; write val_env_manager.group",
    "prompt_length=100": "prompt_length: a trajectory has several turns; write sequence_length for all of it and",
    "response_length=100": "response_length: a trajectory has several turns",
    "sequence_length=null": "sequence_length: is not given; write the longest trajectory in tokens, such as 8192",
    "max_tokens_per_step=null": "max_tokens_per_step: is not given, and neither is actor_infer.generating_args.max_new",
    "max_tokens_per_step=2048": "1 problem\nmax_tokens_per_step: 2048 tokens for one turn leave no room for an "
    "observation in sequence_length 2048; use less, such as 102",
    "custom_envs.Room.max_tokens_per_step=4096": "custom_envs.Room.max_tokens_per_step: 4096 tokens for one turn leave",
    "batch_adjust_mode=copy": "batch_adjust_mode: copy is not available: a copied sample would be trained on twice; "
    "leave it out, and batches are padded",
    "batch_adjust_mode=delete": "batch_adjust_mode: delete is not available",
    "batch_adjust_mode=random_sample": "batch_adjust_mode: random_sample is not available",
    "batch_adjust_mode=fill": "batch_adjust_mode: 'fill' is not one of pad",
    # waiting
    "async_training.max_queue_size=63": "async_training.max_queue_size: 63 trajectories cannot hold 1 batch(es) of "
    "rollout_batch_size 64, so no batch would ever be ready; use at least 64",
    "trajectory_timeout_s=130 env_step_timeout_s=131": "env_step_timeout_s: 131 is never reached: trajectory_timeout_s "
    "130 ends it first; use at most that",
    "trajectory_timeout_s=100 actor_infer.generation_timeout_s=120": "actor_infer.generation_timeout_s: 120 is never "
    "reached: trajectory_timeout_s 100",
    "env_step_timeout_s=0": "env_step_timeout_s: 0.0 is too small; it must be above 0",
    # keys of other pipelines
    "rewards={math_rule: {}}": "rewards: unknown key; it belongs to pipeline rlvr, and this is agentic",
    "target_loss=0.1": "target_loss: unknown key; it belongs to pipeline sft, and this is agentic",
    "actor_train.data_args.file_name=a.jsonl": "actor_train.data_args.file_name: has no effect: environments are",
    "validation.data_args.template=qwen3": "validation.data_args.template: has no effect: training and validation both",
    "actor_train.data_args.template=none": "actor_train.data_args.template: none cannot separate the messages of a",
}


@pytest.mark.parametrize(
    ("env_type", "is_class"),
    [
        *((name, False) for name in ("game:GuessTheNumber-v0", "rg:letter_counting", "math:ASDiv2K", "code:Taco8k")),
        *((name, False) for name in ("qa:HotpotQA", "logic:RuleTaker-d0", "eval:MATH500", "ale_py:ALE/Pong-v5")),
        *(
            (name, True)
            for name in ("guess_env:Guess", "no_such_module:Shop", "my.games:Chess", "game.py:Chess", "g.py")
        ),
        *((name, False) for name in ("frozen_lake", "roll/Sokoban-v0")),
    ],
)
def test_an_id_of_another_library_is_not_a_class_of_the_user(env_type: str, is_class: bool) -> None:
    assert names_class(env_type) == is_class


def test_a_module_of_the_user_may_have_the_name_of_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "game.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert names_class("game:Chess") and not names_class("game:Chess-v0")


@pytest.mark.parametrize(("overrides", "message"), REFUSED.items())
def test_broken_agentic_rule_is_explained(tmp_path: Path, overrides: str, message: str) -> None:
    parts = [overrides] if "{" in overrides else overrides.split()
    assert message in refusal(tmp_path, *parts, text=AGENTIC)


WARNED = {
    "custom_envs.Third.env_type=sokoban val_env_manager.tags=[Room]": "custom_envs.Third: has no effect: no env_manage",
    "val_env_manager.group_size=2 validation.generating_args.temperature=0": "val_env_manager.group_size: 2 runs each",
    "async_training.batch_deadline_s=600": "async_training.batch_deadline_s: 600 ends the run before a trajectory that",
    "custom_envs.Lake.max_tokens_per_step=9 custom_envs.Room.max_tokens_per_step=9 max_tokens_per_step=5": "max_tokens_"
    "per_step: has no effect: every entry of custom_envs has its own max_tokens_per_step",
    f"{TRAIN}.num_env_groups=32 {TRAIN}.num_groups_partition=[16,16]": f"{TRAIN}.num_env_groups: 32 groups never run "
    "at a time: async_generation_ratio and rollout_batch_size admit 16; use that",
    "val_batch_size=8 val_env_manager.num_env_groups=10": "val_env_manager.num_env_groups: 10 groups never run at a "
    "time: val_batch_size has 8; use that",
    "max_tokens_per_step=300": "max_tokens_per_step: 10 turns of up to 300 tokens fill sequence_length 2048",
    f"{SAMPLING}.max_new_tokens=100": f"{SAMPLING}.max_new_tokens: 100 is never reached: max_tokens_per_step ends "
    "turns at 64",
    "validation.generating_args.max_new_tokens=65": "validation.generating_args.max_new_tokens: 65 is never reached",
    "sample_by=step actor_train.training_args.lr_scheduler_type=linear": "linear is computed for the largest possible",
    "rollout_batch_size=96": "96 trajectories do not fill optimizer steps of 64: 32 samples of every batch are masked "
    "padding; use 128 to learn from all",
    "eval_steps=0 val_batch_size=8": "val_batch_size: has no effect: eval_steps is 0, so nothing is validated",
    "eval_steps=0 val_env_manager.tags=[Lake]": "val_env_manager.tags: has no effect: eval_steps is 0",
    "max_resample_factor=2": "max_resample_factor: has no effect: every complete group is trained on",
    "actor_train.data_args.prompt=question": "actor_train.data_args.prompt: has no effect: observations come from",
    "custom_envs.Room.max_steps=5 max_actions_per_traj=3": "max_actions_per_traj: has no effect: every entry of",
    f"{TRAIN}.world_size=8": f"{TRAIN}.world_size: has no effect: processes follow from max_env_num_per_worker",
    "custom_envs.Lake.use_thread_lock=true": "use_thread_lock: has no effect: environments share no state",
    "reward_pretrain=x": "reward_pretrain: has no effect: environments give the rewards",
    "reward={device_mapping: [0]}": "reward: has no effect: environments give the rewards",
    "reward_normalization.norm_std_type=null": "reward_normalization.norm_std_type: has no effect: it belongs to adv_",
    "step_reward_weight=0.5": "step_reward_weight: has no effect: it belongs to adv_estimator gigpo",
    "adv_estimator=step_reinforce episode_reward_weight=2": "episode_reward_weight: has no effect: it belongs to adv_",
    "adv_estimator=agentic_reinforce step_reward_gamma=0.5": "step_reward_gamma: has no effect: it belongs to adv_est",
    "ratio_type=segment actor_train.pg_variant=gspo": "ratio_type: has no effect: this actor_train.pg_variant has",
    f"{SAMPLING}.max_new_tokens=32": f"max_tokens_per_step: 64 is never reached: {SAMPLING}.max_new_tokens ends turns",
    f"{TRAIN}.format_penalty=-0.1": f"{TRAIN}.format_penalty: has no effect: write env_config.format_penalty",
    f"{TRAIN}.generating_args={{top_p: 1}}": "generating_args: has no effect: actor_infer.generating_args is read",
    "custom_envs.Lake.history_length=3": "custom_envs.Lake.history_length: has no effect: every turn sees all",
    "custom_envs.Lake.tool_wrapper={}": "custom_envs.Lake.tool_wrapper: has no effect",
    "env_monitor={enable: false}": "env_monitor: has no effect: every wait has a deadline",
    "partial_gpu_mode=true": "partial_gpu_mode: has no effect: with a ratio of 0 roles take turns",
    "kl_horizon=5": "kl_horizon: has no effect: target_kl is null",
}


@pytest.mark.parametrize(("overrides", "message"), WARNED.items())
def test_harmless_agentic_key_is_a_warning(tmp_path: Path, overrides: str, message: str) -> None:
    parts = [overrides] if "{" in overrides else overrides.split()
    warnings = [str(warning) for warning in check(agentic(tmp_path, *parts)).warnings]
    assert any(message in warning for warning in warnings), warnings


def test_correct_agentic_file_has_no_warnings(tmp_path: Path) -> None:
    report = check(agentic(tmp_path))
    assert (report.errors, report.warnings) == ([], [])


def test_at_least_one_environment_is_required(tmp_path: Path) -> None:
    text = AGENTIC[: AGENTIC.index("custom_envs")] + "custom_envs: {}\n" + AGENTIC[AGENTIC.index("actor_train") :]
    assert "custom_envs: is empty, so there is no environment" in refusal(tmp_path, text=text)


def test_group_size_one_is_allowed_without_comparison(tmp_path: Path) -> None:
    config = agentic(tmp_path, f"{TRAIN}.group_size=1", "adv_estimator=reinforce")
    assert config.num_return_sequences_in_group == 1


def test_an_environment_that_is_not_here_stops_a_run_and_not_a_plan(tmp_path: Path) -> None:
    report = check(agentic(tmp_path, "custom_envs.Lake.env_type=bfcl"))
    assert not report.errors
    [problem] = [problem for problem in report.missing if problem.path == "custom_envs.Lake.env_type"]
    assert problem.message.startswith("bfcl is not an environment of this project; known: frozen_lake, sokoban")
