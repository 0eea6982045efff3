"""Reads what entries of `rewards` in recipes of ROLL write differently: classes of workers, and their options."""

from __future__ import annotations

from roll.compat.recipe import Recipe
from roll.configs.scoring.built_in_rewards import BUILT_IN

WORKERS = {
    "MathRuleRewardWorker": "math_rule",
    "CodeSandboxRewardWorker": "code_sandbox",
    "LLMJudgeRewardWorker": "llm_judge",
    "GeneralRuleRewardWorker": "ifeval",
    "GeneralValRuleRewardWorker": "multiple_choice",
    "CrossThinkQARuleRewardWorker": "multiple_choice",
    "MultipleChoiceBoxedRuleRewardWorker": "multiple_choice",
}
"""Reward worker class of ROLL -> the built-in reward of this project that replaces it."""

DIFFERENCES = {
    "GeneralRuleRewardWorker": ", without its penalty of repeated words",
    "CrossThinkQARuleRewardWorker": ", without points for the format and without its penalties",
    "MultipleChoiceBoxedRuleRewardWorker": ", with or without a box around the choice",
    "CodeSandboxRewardWorker": "; programs run in processes here, and tests of case_type text are not read",
    "LLMJudgeRewardWorker": ", with the question of prompt_template",
}
"""What the built-in reward does differently from the class of ROLL, for the remark."""

TEXT_OPTIONS = {"judge_api_url": "base_url", "judge_model_name": "model"}
"""Options of the judge in ROLL -> keys of a reward in this project."""

KEPT_TYPES = ("strict", "soft")
"""Values of `reward_type` that mean the same in ROLL and in this project, for the rewards that read it."""


def read_rewards(recipe: Recipe) -> None:
    """Translates every entry of `rewards`, in any file; a key of ours that is given as well wins."""
    for name, entry in list(recipe.section("rewards").items()):
        if isinstance(entry, dict):
            _read_worker(recipe, f"rewards.{name}")
            _read_judge(recipe, f"rewards.{name}")


def _read_worker(recipe: Recipe, path: str) -> None:
    """Sets the function that replaces a class, and drops a `reward_type` that it does not read."""
    worker = recipe.get(f"{path}.worker_cls")
    if not isinstance(worker, str):
        return
    worker = worker.rpartition(".")[2]
    built_in = WORKERS.get(worker)
    if built_in is not None and recipe.put_new(f"{path}.function", built_in) and built_in != "math_rule":
        recipe.note(f"{path}.worker_cls", f"{worker} is read as function: {built_in}{DIFFERENCES.get(worker, '')}")
    kind = recipe.get(f"{path}.reward_type")
    readers = [text for name in ("ifeval", "code_sandbox") for text in (name, BUILT_IN[name].function)]
    if recipe.get(f"{path}.function") not in readers or kind not in KEPT_TYPES:
        recipe.drop(f"{path}.reward_type", "right and wrong answers have the scores correct_score and wrong_score")


ROLE_OPTIONS = "model_args.model_name_or_path model_args.dtype device_mapping num_gpus_per_worker system_envs".split()
"""Keys of a judge that ROLL runs as a role of workers, which are those of role judge."""

SAMPLING_OPTIONS = {
    "generating_args.max_new_tokens": "judge_max_tokens",
    "generating_args.temperature": "judge_temperature",
    "data_args.template": "template",
}
"""Keys of such a judge -> keys of the entry in `rewards`."""


def _read_judge_model(recipe: Recipe, path: str) -> None:
    """Reads the model of a judge: one on devices of the run, or with an endpoint the name of the endpoint's model."""
    model = recipe.get(f"{path}.model_args.model_name_or_path")
    if recipe.has(f"{path}.base_url"):
        if isinstance(model, str) and recipe.put_new(f"{path}.model", model):
            recipe.note(f"{path}.model_args.model_name_or_path", f"is read as model: {model}")
        return
    moved = {key: f"judge.{key}" for key in ROLE_OPTIONS}
    moved |= {key: f"{path}.{ours}" for key, ours in SAMPLING_OPTIONS.items()}
    for key, ours in moved.items():
        value = recipe.get(f"{path}.{key}")
        if value is not None and recipe.put_new(ours, value):
            recipe.take(f"{path}.{key}")
            if key == "device_mapping":
                what = "is read as judge.device_mapping, the devices of SGLang engines that grade"
                recipe.note(f"{path}.{key}", what)


def _read_judge(recipe: Recipe, path: str) -> None:
    """Renames the options of a judge; the model that it runs itself becomes that of role judge, with its devices."""
    for other, ours in TEXT_OPTIONS.items():
        recipe.move(f"{path}.{other}", f"{path}.{ours}", ours)
    if recipe.get(f"{path}.judge_model_type") == "inference":
        _read_judge_model(recipe, path)
    recipe.drop(f"{path}.judge_prompt", "it names a prompt of ROLL; prompt_template is the text of the question")
    if recipe.take(f"{path}.judge_api_key") is not None:
        message = "keys are not read from files; export it, and write api_key_env: the name of the variable"
        recipe.error(f"{path}.judge_api_key", message)
