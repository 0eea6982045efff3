"""Makes what a rehearsal runs on: random models, a tokenizer, and a few rows of data or probed environments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from roll.base.errors import RunError
from roll.configs.agentic import AgenticConfig
from roll.configs.pipeline import BaseConfig, RLConfig, RLVRConfig
from roll.configs.user_code import failure_text, users_frame
from roll.plan.check_inputs import check_environments
from roll.tools.rehearse.batches import shrink_batch, structure_of
from roll.tools.rehearse.data import fewest_actions, longest_messages, write_data
from roll.tools.rehearse.layouts import shrink_layouts
from roll.tools.rehearse.model import add_score_head, find_model, find_tokenizer, write_model
from roll.tools.rehearse.shrink import Inputs

VALIDATION_ROWS = 4
"""Rows of validation."""

SFT_ROWS = 16
"""Rows that SFT trains on."""


def make_inputs(recipe: BaseConfig, folder: Path, steps: int, say: Callable[[str], None]) -> Inputs:
    """Writes models and data below `folder`; RLVR gets as many prompts as `steps` consume, so every reward has some.

    Raises:
        ConfigError, UnsupportedModel: the model cannot be rehearsed.
        DatasetError: the recipe's own data cannot be used.
        RunError: an environment failed; the message begins with the place in the user's code.
    """
    main = recipe.actor_train.model_args.model_name_or_path or ""
    source = find_model(main)
    stops = recipe.actor_infer.generating_args.stop_strings if isinstance(recipe, RLConfig) else []
    tokenizer, why = find_tokenizer(source, [*stops, *recipe.validation.generating_args.stop_strings])
    judge = recipe.judge.model_args.model_name_or_path if isinstance(recipe, RLVRConfig) else None
    names = {main, *(role.model_args.model_name_or_path or "" for role in recipe.device_roles().values())}
    models = {
        name: str(
            write_model(source if name == judge else find_model(name), tokenizer, folder / f"model-{number}", number)
        )
        for number, name in enumerate(sorted(names, key=lambda name: (name != main, name)))
    }
    if isinstance(recipe, RLVRConfig) and recipe.uses_reward_model:
        add_score_head(Path(models[recipe.reward.model_args.model_name_or_path or ""]))
    kind = f"a stand-in tokenizer, since {why}" if why else f"its own tokenizer of {len(tokenizer)} tokens"
    described = f"a random {source.family.architecture} (known from {source.basis}) with {kind}"
    say(f"model: {described}")
    reasons = {"model": described}
    if isinstance(recipe, AgenticConfig):
        first, between = _probe(recipe)
        actions = fewest_actions(recipe)
        return Inputs(models, prompt_tokens=first, turn_tokens=between, actions=actions, reasons=reasons)
    rows = {"actor_train": _training_rows(recipe, steps)} | (
        {"validation": VALIDATION_ROWS} if recipe.eval_steps else {}
    )
    files: dict[str, list[str]] = {}
    prompt = sequence = 1
    for role, count in rows.items():
        data = write_data(recipe, role, tokenizer, folder / "data", count)
        reasons[role] = data.reason or "the first rows"
        say(f"data of {role}: {data.reason or 'the first rows of its own files'}")
        files[role] = data.files
        prompt, sequence = max(prompt, data.prompt_tokens), max(sequence, data.sequence_tokens)
    return Inputs(models, files, prompt, sequence, reasons=reasons)


def _training_rows(recipe: BaseConfig, steps: int) -> int:
    if not isinstance(recipe, RLConfig):
        return SFT_ROWS
    data_parallel = shrink_layouts(recipe.device_roles()).layouts["actor_train"].data
    return shrink_batch(structure_of(recipe), data_parallel).groups * steps


def _probe(recipe: AgenticConfig) -> tuple[int, int]:
    problems = check_environments(recipe)  # first, because a process of its own may hang or die
    if problems:
        raise RunError("\n".join(problems))
    try:
        return longest_messages(recipe)
    except Exception as error:
        if users_frame(error) is None:
            raise
        raise RunError(failure_text(error)) from error
