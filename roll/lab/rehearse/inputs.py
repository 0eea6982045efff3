"""Makes what a rehearsal runs on: random models, a tokenizer, and a few rows of data or probed environments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from roll.base.errors import ConfigError, RunError
from roll.configs.agentic import AgenticConfig
from roll.configs.environments import CustomEnvConfig
from roll.configs.pipeline import BaseConfig, RLConfig, RLVRConfig
from roll.configs.user_code import failure_text, users_frame
from roll.envs import make_env
from roll.lab.rehearse.data import write_data
from roll.lab.rehearse.model import add_score_head, find_tokenizer, recipe_model, write_model
from roll.lab.rehearse.sizes import shrink_batch, shrink_layouts
from roll.plan.check_inputs import check_environments

VALIDATION_ROWS = 4
"""Rows of validation."""

EXAMPLES = 16
"""Rows that SFT and preference training learn from."""

FEW_ACTIONS = 3
"""Actions of a trajectory: a first turn, one that continues, and one that ends it."""

CHAT_TOKENS = 200
"""Upper bound of what a chat template adds to one message, its default system message included."""

PROBED_STEPS = 2
"""Steps of an environment whose observations are measured."""


@dataclass(frozen=True)
class Inputs:
    """What a rehearsal puts in place of the recipe's model and data.

    Attributes:
        models: name of a model in the recipe -> folder of its random stand-in.
        files: role -> its data files; only of roles that read files.
        prompt_tokens: of the longest prompt, or of the first message of a trajectory.
        sequence_tokens: of the longest prompt with its answer (SFT).
        turn_tokens: of the messages between two answers (agents).
        actions: of a trajectory, by tag (agents).
        reasons: key -> why its stand-in is used, for the list of changes.
    """

    models: Mapping[str, str]
    files: Mapping[str, list[str]] = field(default_factory=dict)
    prompt_tokens: int = 64
    sequence_tokens: int = 96
    turn_tokens: int = 64
    actions: Mapping[str, int] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)


def make_inputs(recipe: BaseConfig, folder: Path, steps: int, say: Callable[[str], None]) -> Inputs:
    """Writes models and data below `folder`; RLVR gets as many prompts as `steps` consume, so every reward has some.

    Raises:
        ConfigError, UnsupportedModel: the model cannot be rehearsed.
        DatasetError: the recipe's own data cannot be used.
        RunError: an environment failed; the message begins with the place in the user's code.
    """
    main = recipe.actor_train.model_args.model_name_or_path or ""
    source = recipe_model(main)
    stops = recipe.actor_infer.generating_args.stop_strings if isinstance(recipe, RLConfig) else []
    tokenizer, why = find_tokenizer(source, [*stops, *recipe.validation.generating_args.stop_strings])
    judge = recipe.judge.model_args.model_name_or_path if isinstance(recipe, RLVRConfig) else None
    names = {role.model_args.model_name_or_path or "" for role in recipe.device_roles().values()} - {main}
    models = {}
    for number, name in enumerate([main, *sorted(names)]):
        model = source if name == judge else recipe_model(name)
        models[name] = str(write_model(model, tokenizer, folder / f"model-{number}", number))
    if isinstance(recipe, RLVRConfig) and recipe.uses_reward_model:
        add_score_head(Path(models[recipe.reward.model_args.model_name_or_path or ""]))
    kind = f"a stand-in tokenizer, since {why}" if why else f"its own tokenizer of {len(tokenizer)} tokens"
    reasons = {"model": f"a random {source.family.architecture} (known from {source.basis}) with {kind}"}
    say(f"model: {reasons['model']}")
    if isinstance(recipe, AgenticConfig):
        first, between = _probe(recipe)
        actions = fewest_actions(recipe)
        return Inputs(models, prompt_tokens=first, turn_tokens=between, actions=actions, reasons=reasons)
    rows = {"actor_train": _training_rows(recipe, steps), "validation": VALIDATION_ROWS if recipe.eval_steps else 0}
    made = {role: write_data(recipe, role, tokenizer, folder / "data", count) for role, count in rows.items() if count}
    for role, data in made.items():
        reasons[role] = data.reason or "the first rows"
        say(f"data of {role}: {data.reason or 'the first rows of its own files'}")
    return Inputs(
        models,
        {role: data.files for role, data in made.items()},
        prompt_tokens=max(data.prompt_tokens for data in made.values()),
        sequence_tokens=max(data.sequence_tokens for data in made.values()),
        reasons=reasons,
    )


def _training_rows(recipe: BaseConfig, steps: int) -> int:
    if not isinstance(recipe, RLConfig):
        return EXAMPLES
    data_parallel = shrink_layouts(recipe.device_roles()).layouts["actor_train"].data
    return shrink_batch(recipe, data_parallel).groups * steps


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


def fewest_actions(config: AgenticConfig) -> dict[str, int]:
    """Actions of a trajectory of each tag: `FEW_ACTIONS`, or as many as its environment accepts at least."""
    found = {}
    for tag, entry in config.custom_envs.items():
        most = entry.max_steps or FEW_ACTIONS
        accepted = (count for count in range(min(FEW_ACTIONS, most), most) if _accepts(entry, count))
        found[tag] = next(accepted, most)
    return found


def _accepts(entry: CustomEnvConfig, actions: int) -> bool:
    try:
        make_env(entry.env_type, {**entry.env_config, "max_steps": actions}).close()
    except ConfigError:
        return False
    return True


def longest_messages(config: AgenticConfig) -> tuple[int, int]:
    """Upper bounds of the tokens of the first message of a trajectory, and of the messages between two answers.

    Every environment is reset and stepped a few times; a token has at least one byte.
    """
    first = between = 0
    for tag, entry in config.custom_envs.items():
        env = make_env(entry.env_type, entry.env_config, f"custom_envs.{tag}")
        observations = [env.reset(seed=config.seed)[0]]
        for _ in range(PROBED_STEPS):
            observation, _, terminated, truncated, _ = env.step("")
            observations.append(observation)
            if terminated or truncated:
                break
        env.close()
        message = _bytes(entry.agent_template) + max(map(_bytes, observations)) + CHAT_TOKENS
        first = max(first, message + _bytes(entry.agent_system_template or "") + _bytes(env.instruction))
        between = max(between, message)
    return first, between


def _bytes(text: str) -> int:
    return len(text.encode())
