"""Tries what a run reads from the user before anything starts: data, tokenizer, reward functions and environments.

`roll plan` and `roll run` do this; it imports no torch and takes seconds.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from roll.base.errors import ConfigError, Report, git_lfs_pointer
from roll.configs.agentic import AgenticConfig
from roll.configs.arguments import DataArguments
from roll.configs.environments import is_external, names_class
from roll.configs.learning.lora import no_policy, policy_of
from roll.configs.pipeline import BaseConfig, PreferenceConfig, RewardModelConfig, RLVRConfig, SFTConfig
from roll.configs.scoring.built_in_rewards import built_in_of, is_comparison, scoring_role
from roll.configs.scoring.rewards import RewardConfig, lacks_function, no_reward, rewards_of, truths_read
from roll.configs.scoring.scoring_roles import JudgeConfig
from roll.configs.user_code import NOTICE_S
from roll.datasets.preferences import read_preference
from roll.datasets.prompts import Prompt, read_prompt, repeated_ids
from roll.datasets.records import DatasetError, Record, read_first
from roll.datasets.sft import read_prompt_response
from roll.datasets.templates import template_problem
from roll.envs.external import package_to_install
from roll.envs.registry import BUILT_IN_ENVS, make_env
from roll.hub.names import CONFIG_NAME, TOKENIZER_FILES, has_tokenizer, local_file, local_model, missing_model_files
from roll.hub.special_tokens import TOKEN_NAMES, TOKENIZER_CONFIG, read_tokenizer, special_token, special_token_id
from roll.models.families.chat_template import NATIVE
from roll.models.families.hf_config import UnsupportedModel, read_positions
from roll.models.weight_files import NoWeights, check_weights, read_headers
from roll.plan.episode_lengths import check_lengths
from roll.plan.token_trial import first_items, try_tokens
from roll.rewards.calling import RewardFunctionError, RewardRequest
from roll.sandbox.client import available_isolation
from roll.usercode.env_trial import EnvTrial, Played, play, try_environments
from roll.usercode.pool import START_TIMEOUT_S
from roll.usercode.reward_pool import MissingRewardError, RewardPool, RewardSelfTestError

CHECKED_ROWS = 50_000
"""Rows of each data file that are checked; a larger file would delay the start by more than seconds."""

SHOWN_ROWS = 5
"""Broken rows of a data file that are listed."""


def check_inputs(config: BaseConfig) -> Report:
    """What is wrong with the data, tokenizers, rewards and environments that a run would use.

    Data files and folders that are not on this machine are left out, since the rules of the configuration report them.
    Problems with the user's code have no path: their text begins with the user's file and line.
    """
    report = Report()
    _check_tokenizers(config, report)
    _check_weights(config, report)
    samples: dict[str, tuple[Sequence[Any], bool]] = {}
    if isinstance(config, RLVRConfig):
        planned = [name for name in config.rewards if lacks_function(config, name)]
        read = partial(read_prompt, truths_read=partial(truths_read, config.rewards, left_out=planned))
        prompts = _check_data(config, report, read, samples)
        asyncio.run(_check_rewards(config.rewards, prompts, config.actor_train.data_args.file_name, report))
        for tag in dict.fromkeys(prompt.tag for prompt in prompts):
            if policy_of(config.policies, tag) is None:
                report.error("policies", no_policy(config.policies, tag))
        found = {prompt.tag for prompt in prompts}
        for name, policy in config.policies.items():
            if found and found.isdisjoint(policy.tags):
                report.warn(f"policies.{name}.tags", f"no row read has one; there are {', '.join(sorted(found))}")
    elif isinstance(config, SFTConfig):
        _check_data(config, report, read_prompt_response, samples)
    elif isinstance(config, PreferenceConfig):
        _check_data(config, report, read_preference, samples)
    elif isinstance(config, AgenticConfig):
        played: dict[str, Played] = {}
        for problem in check_environments(config, played):
            report.error("", problem)
        for path, episode in played.items():
            if episode.failure:
                limit = f"more than max_failure_rate {config.max_failure_rate:g} of the groups of a batch fail"
                failure = episode.failure.splitlines()[0]
                report.warn(path, f"failed in a part of its trial: {failure}; a run ends when {limit}")
        count = _token_counter(config)
        if count is not None:
            positions = read_positions(local_model(config.actor_train.model_args.model_name_or_path or ""))
            check_lengths(config, played, count, report, positions)
        if any(entry.is_agent for entry in config.custom_envs.values()):
            from roll.plan.agent_trial import check_agents  # imports aiohttp

            check_agents(config, report, count, _shows_tools(config))
    names = [worker.model_args.model_name_or_path for worker in config.device_roles().values()]
    if not report.errors and any(name is not None and has_tokenizer(local_model(name)) for name in names):
        report.include(try_tokens(config, samples))
    return report


def check_environments(config: AgenticConfig, played: dict[str, Played] | None = None) -> list[str]:
    """What is wrong with the user's own environments; the rules of the configuration make the others.

    `played` gets an episode of each environment by the path of its entry, of built-in ones too.
    """
    trials = [
        EnvTrial(f"custom_envs.{tag}", env.env_type, env.env_config)
        for tag, env in config.custom_envs.items()
        if not env.is_agent
    ]
    own = [trial for trial in trials if _needs_process(trial)]
    if played is not None:
        built_in = {trial.path: _play_built_in(trial) for trial in trials if trial not in own}
        played |= {path: episode for path, episode in built_in.items() if isinstance(episode, Played)}
    return try_environments(own, config.env_step_timeout_s, played) if own else []


def _needs_process(trial: EnvTrial) -> bool:
    """Whether it runs code of the user, or of a package or server that is here."""
    if is_external(trial.env_type):
        return package_to_install(trial.env_type) is None
    return names_class(trial.env_type) or bool(trial.env_config.get("tools"))


def _play_built_in(trial: EnvTrial) -> Played | str:
    if trial.env_type not in BUILT_IN_ENVS:
        return f"{trial.env_type} is not here"
    try:
        return play(make_env(trial.env_type, trial.env_config))
    except ConfigError as error:  # the rules report it
        return str(error)


def _check_weights(config: BaseConfig, report: Report) -> None:
    seen: set[tuple[str, bool]] = set()
    for role, worker in config.device_roles().items():
        name = worker.model_args.model_name_or_path
        folder = local_model(name or "")
        if name is None or (name, worker.value_head) in seen or not (folder / CONFIG_NAME).is_file():
            continue
        if folder != Path(name) and missing_model_files(folder):  # a run fetches the rest
            continue
        seen.add((name, worker.value_head))
        path = "pretrain" if name == config.pretrain else f"{role}.model_args.model_name_or_path"
        try:
            if isinstance(worker, JudgeConfig):  # SGLang reads models of more families
                read_headers(folder)
                continue
            for warning in check_weights(folder, worker.value_head):
                report.warn(path, warning)
        except NoWeights as error:
            report.missing_resource(path, str(error))
        except UnsupportedModel as error:
            report.error(path, str(error))


def _shows_tools(config: BaseConfig) -> bool:
    """Whether the chat template of a model on this machine mentions tools, as all built-in ones do."""
    folder = local_model(config.actor_train.model_args.model_name_or_path or "")
    if config.actor_train.data_args.template != NATIVE or not _has_chat_template(folder):
        return True
    files = (folder / name for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"))
    return any("tools" in file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file())


def _token_counter(config: BaseConfig) -> Callable[[str], int] | None:
    tokenizer = read_tokenizer(config.actor_train.model_args.model_name_or_path)
    return None if tokenizer is None else lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _check_tokenizers(config: BaseConfig, report: Report) -> None:
    name = config.actor_train.model_args.model_name_or_path
    folder = local_model(name or "")
    path = "pretrain" if name == config.pretrain else "actor_train.model_args.model_name_or_path"
    roles = {f"{role}.data_args.template": getattr(config, role).data_args.template for role in config.data_roles()}
    _check_tokenizer(path, name, roles, report)
    if isinstance(config, RLVRConfig):
        _check_scoring_models(config, report)
    if isinstance(config, RewardModelConfig) and config.save_hf_model and folder.is_dir():
        _check_padding(path, folder, report)


def _check_scoring_models(config: RLVRConfig, report: Report) -> None:
    for role, section in (("reward", config.reward), ("judge", config.judge)):
        templates = {
            f"rewards.{name}.template": reward.template
            for name, reward in config.rewards.items()
            if scoring_role(reward) == role and reward.template is not None
        }
        if templates:
            name = section.model_args.model_name_or_path
            _check_tokenizer(f"{role}.model_args.model_name_or_path", name, templates, report)


def _check_tokenizer(path: str, name: str | None, templates: Mapping[str, str], report: Report) -> None:
    """The folder of a model on this machine has a tokenizer that can apply `templates`, by the paths of their keys."""
    folder = local_model(name or "")
    if name is None or not folder.is_dir():
        return
    if not has_tokenizer(folder):
        report.missing_resource(
            path,
            f"{name} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}); copy the files of the "
            "tokenizer from the model it was made from",
        )
    elif unread := list(_unread_files(folder)):
        report.error(path, unread[0])
    elif (folder / TOKENIZER_FILES[0]).is_file():
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILES[0]))
        except Exception as error:  # the library raises Exception itself
            report.error(path, f"{folder / TOKENIZER_FILES[0]} cannot be read as a tokenizer: {error}")
            return
        vocabulary, has_template = tokenizer.get_vocab(with_added_tokens=True), _has_chat_template(folder)
        for key, template in templates.items():
            problem = template_problem(template, has_template, vocabulary)
            if problem is not None:
                report.error(key, problem)


def _unread_files(folder: Path) -> Iterator[str]:
    """What is wrong with the text files of a tokenizer: a git-lfs pointer, or options that are no JSON object."""
    for file in sorted(
        each for each in folder.iterdir() if each.is_file() and each.suffix in (".json", ".jinja", ".txt", ".model")
    ):
        try:
            problem = git_lfs_pointer(file)
            if not problem and file.name in TOKEN_NAMES:
                found = json.loads(file.read_text(encoding="utf-8"))
                problem = None if isinstance(found, dict) else f"holds a {type(found).__name__}; write a JSON object"
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
        except (ValueError, RecursionError) as error:
            problem = f"is not JSON: {error}"
        if problem:
            yield f"{file}: {problem}"


def _check_padding(path: str, folder: Path, report: Report) -> None:
    """The token by which transformers finds the end of a sequence is not one of the sequence."""
    padding, end = (special_token(folder, name) for name in ("pad_token", "eos_token"))
    fix = f"set pad_token in {folder / TOKENIZER_CONFIG} to a token that no text has"
    if padding is None:
        report.warn(path, f"its tokenizer has no pad_token: transformers will rate one sequence at a time; {fix}")
    elif padding == end:
        report.warn(
            path,
            f"its tokenizer pads with the end token {end}: transformers will take the reward of the exported model one "
            f"token too early, before that token; {fix}",
        )
    elif special_token_id(folder, "pad_token") is None:
        report.warn(
            path,
            f"no file of its tokenizer gives the id of its pad_token {padding}: the exported model keeps the "
            f"pad_token_id of its config.json, if it has one; {fix} and that is in its vocabulary",
        )


def _has_chat_template(folder: Path) -> bool:
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    try:
        options = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(options, dict) and bool(options.get("chat_template"))


def _check_data(
    config: BaseConfig,
    report: Report,
    read: Callable[..., Any],
    samples: dict[str, tuple[Sequence[Any], bool]],
) -> list[Any]:
    """The first rows of every data file of training and validation; what is broken goes into the report.

    `samples` gets the first items of each role, and whether these are all.
    """
    found: list[Any] = []
    questions: dict[str, set[str]] = {}
    for role in config.data_roles():
        args: DataArguments = getattr(config, role).data_args
        of_role: list[tuple[Record, Any]] = []
        whole = True
        for file in filter(Path.is_file, map(local_file, args.file_name)):
            try:
                rows, errors = read_first(file, CHECKED_ROWS, partial(_with_record, read=read, args=args))
            except DatasetError as error:
                rows, errors = [], [error]
            of_role += rows
            whole = whole and len(rows) + len(errors) < CHECKED_ROWS
            _report_broken(f"{role}.data_args", file, errors, report)
        items = [item for _, item in of_role]
        if items:
            first = first_items(items)
            samples[role] = (first, whole and len(first) == len(items))
        found += items
        questions[role] = {repr((item.question.text, item.question.messages)) for item in items}
        repeated = repeated_ids([item.id for _, item in of_role], [record for record, _ in of_role])
        if repeated:
            report.warn(f"{role}.data_args.id", repeated)
        if role == "actor_train" and whole:
            _check_batch(config, len(of_role), report)
        if isinstance(config, PreferenceConfig):
            equal = sum(item.chosen == item.rejected for item in items)
            text = f"{equal:,} of {len(items):,} pairs have two equal responses; they are left out"
            if equal:
                (report.error if equal == len(items) else report.warn)(f"{role}.data_args", text)
    _check_held_out(config, questions, report)
    return found


def _check_held_out(config: BaseConfig, questions: dict[str, set[str]], report: Report) -> None:
    if "validation" not in config.data_roles():
        return
    train, val = (
        {_source(name, role, config) for name in getattr(config, role).data_args.file_name}
        for role in ("actor_train", "validation")
    )
    both, text = questions["actor_train"] & questions["validation"], ""
    if train & val:
        text = f"{min(train & val)[0]} is trained on too, so its score is not of unseen prompts"
    elif both:
        text = (
            f"{len(both):,} of {len(questions['validation']):,} prompts are in the training data too; remove them there"
        )
    if text:
        report.warn("validation.data_args.file_name", text)


def _source(name: str, role: str, config: BaseConfig) -> tuple[str, ...]:
    """A file, or a dataset with its subset and split: without a split, those of training and validation differ."""
    args = getattr(config, role).data_args
    file = local_file(name)
    return (str(file.resolve()),) if file.is_file() else (name, args.subset or "", args.split or role)


def _report_broken(path: str, file: Path, errors: Sequence[DatasetError], report: Report) -> None:
    kinds: dict[str, list[str]] = {}
    for error in errors:
        kinds.setdefault(str(error).removeprefix(f"{file}:").partition(": ")[2], []).append(str(error))
    for first, *others in list(kinds.values())[:SHOWN_ROWS]:
        report.error(path, f"{first} ({len(others):,} more rows alike)" if others else first)
    hidden = sum(map(len, list(kinds.values())[SHOWN_ROWS:]))
    if hidden:
        report.error(path, f"{file}: {hidden:,} more of its first {CHECKED_ROWS:,} rows are broken")


def _check_batch(config: BaseConfig, rows: int, report: Report) -> None:
    batch, path = config.actor_train.samples_per_optimizer_step, "actor_train.training_args.gradient_accumulation_steps"
    if isinstance(config, RLVRConfig):
        batch, path = config.rollout_batch_size, "rollout_batch_size"
    if 0 < rows < batch:
        report.warn(path, f"a batch takes {batch:,} of the {rows:,} rows of the data: every batch repeats some")


def _with_record(record: Record, read: Callable[..., Any], args: DataArguments) -> tuple[Record, Any]:
    return record, read(record, args)


async def _check_rewards(
    rewards: dict[str, RewardConfig], prompts: list[Prompt], files: list[str], report: Report
) -> None:
    first: dict[tuple[str, bool], Prompt] = {}
    for prompt in prompts:
        first.setdefault((prompt.tag, prompt.ground_truth is None), prompt)
    tags = list(dict.fromkeys(prompt.tag for prompt in prompts))
    for name, reward in rewards.items():
        absent = [tag for tag in reward.tag_included if tags and tag not in tags]
        if absent:
            message = f"no row read has the tag {', '.join(absent)}; there are {', '.join(tags)}"
            report.warn(f"rewards.{name}.tag_included", message)
    requests: dict[str, list[RewardRequest]] = {name: [] for name in rewards}
    for (tag, _), prompt in first.items():
        names = rewards_of(rewards, tag)
        if not names:
            report.error("rewards", no_reward(rewards, tag))
        for name in names:
            request = RewardRequest((), prompt.ground_truth, prompt.question, prompt.row, prompt.tag, prompt.id)
            requests[name].append(request)
    _check_isolation(rewards, report)
    await asyncio.gather(*(_check_reward(name, rewards[name], requests[name], files, report) for name in rewards))


def _check_isolation(rewards: dict[str, RewardConfig], report: Report) -> None:
    names = [name for name, reward in rewards.items() if built_in_of(reward.function) == "code_sandbox"]
    if not names:
        return
    isolation, reason = available_isolation()
    if isolation == "processes":
        report.warn(
            f"rewards.{names[0]}",
            f"programs run without namespaces ({reason}): their time, memory and calls are limited, but they read and "
            "write the files that their user may; allow user namespaces, such as with docker's --security-opt "
            "seccomp=unconfined",
        )


async def _check_reward(
    name: str, reward: RewardConfig, first: list[RewardRequest], files: list[str], report: Report
) -> None:
    built_in = built_in_of(reward.function)
    is_missing = built_in == "math_rule" and reward.worker_cls is not None
    is_missing |= built_in == "llm_judge" and reward.model is None
    if scoring_role(reward) is not None or built_in is not None and (not first or is_missing):
        return  # nothing of the user's takes part, or the rules report what is missing
    pool = RewardPool(replace(reward, world_size=1))
    trial = asyncio.ensure_future(pool.self_test(first))
    try:
        if not (await asyncio.wait([trial], timeout=NOTICE_S))[0]:
            limits = f"at most {START_TIMEOUT_S:g} s for its import and timeout_s {reward.timeout_s:g} s for a call"
            print(f"rewards.{name}: the trial of {reward.function} has taken {NOTICE_S:g} s; {limits}", file=sys.stderr)
        await trial
    except MissingRewardError as error:
        report.missing_resource("", f"{error}\n    rewards.{name} was imported before the run")
    except (RewardFunctionError, RewardSelfTestError) as error:
        add = report.missing_resource if built_in == "llm_judge" else report.error
        of_data = is_comparison(reward.function) and isinstance(error, RewardSelfTestError)
        add(", ".join(files) if of_data else "", f"{error}\n    rewards.{name} was tried before the run")
    finally:
        pool.close()
