"""LoRA: adapters of low rank that are trained in place of the model's weights; their keys and checks."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from roll.base.errors import Finding, error, warning
from roll.base.schema import Condition, needs, one_or_many, option
from roll.hub.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS, cached_folder, hub_name, local_model
from roll.models.families.hf_config import UnsupportedModel
from roll.models.families.layouts import InputSplit
from roll.models.families.shape import ModelShape, read_model_shape
from roll.models.families.weights import ALL_LINEAR, is_linear, target_name, target_rules

if TYPE_CHECKING:
    from roll.configs.arguments import TrainingArguments
    from roll.configs.pipeline import BaseConfig, RLConfig

LOWEST_USUAL_RATE = 5e-6
"""Smallest learning rate of adapters that is not warned of."""

PLAIN = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "fan_in_fan_out": False,
    "lora_bias": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": None,
}
"""Keys of adapter_config.json that change what is computed, and the one value of each that is read."""

POLICY_NAME = re.compile(r"[\w-]+", re.ASCII)
"""Names of policies."""

TARGET_GIVEN = needs("lora_target", "lora_target is empty; write all-linear or names of linear layers", is_error=True)


def parse_targets(value: Any) -> Any:
    """Names as a list, or as a text with commas."""
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


def no_dropout(value: Any) -> Any:
    """Refuses dropout."""
    if isinstance(value, int | float) and value != 0:
        raise ValueError(f"{value} would make a token's probability random; use 0")
    return value


@dataclass
class LoraArguments:
    """Adapters of low rank beside frozen weights."""

    lora_target: list[str] = option(
        factory=list,
        parse=parse_targets,
        help="Linear layers that get an adapter of low rank (LoRA), by their HF names such as q_proj, or all-linear; "
        "all other weights are frozen. Empty: all weights are trained.",
    )
    lora_rank: int = option(8, "Rank of the adapters.", ge=1, usual=(1, 1024), only_for=TARGET_GIVEN)
    lora_alpha: float | None = option(
        None,
        "What adapters add is multiplied by lora_alpha / lora_rank. Default: lora_rank.",
        gt=0,
        usual=(0.5, 4096),
        only_for=TARGET_GIVEN,
    )
    lora_dropout: float = option(
        0.0, "Only 0: old and new policy have to compute the same.", parse=no_dropout, only_for=TARGET_GIVEN
    )
    adapter_name_or_path: str | None = option(
        None,
        "PEFT adapter that training starts from, a folder or a name on the hub as of `pretrain`; its rank, alpha and "
        "layers are then the defaults.",
        only_for=TARGET_GIVEN,
    )

    @property
    def trains_adapters(self) -> bool:
        return bool(self.lora_target)

    @property
    def lora_scale(self) -> float:
        """Factor of what adapters add."""
        return (self.lora_rank if self.lora_alpha is None else self.lora_alpha) / self.lora_rank


@dataclass
class LoraUpdateArguments:
    """How adapters reach the engines."""

    lora_update: Literal["auto", "adapter", "merged"] = option(
        "auto",
        "`adapter`: engines get the adapters, go on generating, and each request keeps its adapter; `merged`: they get "
        "the weights of the layers in lora_target with the adapters added, rounded to their dtype. `auto`: adapter for "
        "several policies, and on cuda or in bf16 where engines keep the weights that they have loaded; otherwise "
        "merged.",
        only_for=needs("model_args", "lora_target is empty", accepts=lambda model: model.trains_adapters),
    )


@dataclass
class PolicyArguments:
    """One of several policies that share the weights below their adapters; what is not given is as in actor_train."""

    tags: list[str] = option(
        factory=list, parse=one_or_many, help="Tags of the prompts that this policy answers and learns from."
    )
    lora_rank: int | None = option(None, "Rank of its adapters.", ge=1, usual=(1, 1024))
    lora_alpha: float | None = option(
        None, "What its adapters add is multiplied by lora_alpha / lora_rank.", gt=0, usual=(0.5, 4096)
    )
    learning_rate: float | None = option(None, "Peak of its learning rate.", gt=0, usual=(1e-10, 0.1))


@dataclass
class PoliciesOptions:
    """Policies that share a model, engines and devices."""

    policies: dict[str, PolicyArguments] = option(
        factory=dict,
        help="Policies by name, each with adapters (lora_target) of its own on the weights that all share. The tag of "
        "a prompt says whose it is. Empty: one policy learns from all prompts.",
        only_for=(
            Condition(
                lambda config, _: config.pipeline == "rlvr", "prompts have tags in rlvr alone", ("pipeline",), True
            ),
            Condition(
                lambda config, _: config.actor_train.model_args.trains_adapters,
                "policies share weights only where adapters are trained; set lora_target",
                ("actor_train.model_args.lora_target",),
                is_error=True,
            ),
        ),
    )


LoraT = TypeVar("LoraT", bound=LoraArguments)


def by_policy(model: LoraT, policies: Mapping[str, PolicyArguments]) -> dict[str, LoraT]:
    """What is trained of each policy; without several that of the only one, which has no name."""
    if not policies:
        return {"": model}
    return {
        name: replace(model, lora_rank=own.lora_rank or model.lora_rank, lora_alpha=own.lora_alpha or model.lora_alpha)
        for name, own in policies.items()
    }


def training_of(arguments: TrainingArguments, policy: PolicyArguments | None) -> TrainingArguments:
    """The optimizer and schedule of a policy."""
    rate = None if policy is None else policy.learning_rate
    return arguments if rate is None else replace(arguments, learning_rate=rate)


def policy_of(policies: Mapping[str, PolicyArguments], tag: str) -> str | None:
    """The name of the policy of a tag; None if it belongs to none."""
    if not policies:
        return ""
    return next((name for name, policy in policies.items() if tag in policy.tags), None)


def no_policy(policies: Mapping[str, PolicyArguments], tag: str) -> str:
    """What to do about a tag that belongs to none."""
    known = {name: policy.tags for name, policy in policies.items()}
    return f"no policy has the tag {tag!r}; add it to the tags of one: {known}"


def base_is_reference(config: Any) -> bool:
    """Whether the reference is the model below the adapters of actor_train, on its devices."""
    adapters = config.actor_train.model_args.trains_adapters
    return bool(
        config.uses_reference
        and adapters
        and not config.reference.device_mapping
        and not getattr(config, "uses_teacher", False)
    )


def without_base(config: RLConfig, platform: str) -> str:
    """Why engines do not have the weights below the adapters by themselves; empty where they do."""
    if config.actor_infer.strategy_args.strategy_config.get("load_format") == "dummy":
        return "load_format of actor_infer is dummy"
    names = (role.model_args.model_name_or_path or "" for role in (config.actor_train, config.actor_infer))
    if len({local_model(name).resolve() for name in names}) > 1:
        return "actor_infer has another model than actor_train"
    return "actor_infer discards its weights in turns with actor_train" if config.takes_turns(platform) else ""


def merging_rounds(config: RLConfig) -> bool:
    """Whether weights with adapters added lose what adapters add: a change below 1/512 of a bf16 weight is none."""
    return {config.actor_train.model_args.dtype, config.actor_infer.model_args.dtype} != {"fp32"}


def linear_names(shape: ModelShape) -> list[str]:
    """Values of `lora_target` for a model."""
    return [target_name(name) for rule in shape.family.layer if is_linear(rule) for name in rule.hf]


def adapter_arguments(models: Collection[LoraArguments], shape: ModelShape, ahead: int) -> dict[str, Any]:
    """SGLang's options for a batch with adapters of `ahead` + 1 versions of each policy, and requests without one."""
    targets = next(iter(models)).lora_target
    return {
        "enable_lora": True,
        "max_lora_rank": max(model.lora_rank for model in models),
        "lora_target_modules": linear_names(shape) if targets == [ALL_LINEAR] else targets,
        "max_loras_per_batch": 1 + len(models) * (1 + ahead),
    }


def adapter_parameters(shape: ModelShape, arguments: LoraArguments, layers: int, tensor: int = 1) -> int:
    """Trained parameters of a stage of `layers` on one of `tensor` ranks; all have one matrix of an adapter."""
    count = 0
    for rule, parts in target_rules(shape.family.layer, arguments.lora_target):
        (rows, columns), by_columns = rule.shape(shape), isinstance(rule.layout, InputSplit)
        rows, columns = (rows, columns // tensor) if by_columns else (rows // tensor, columns)
        count += arguments.lora_rank * (rows + len(parts) * columns)
    return layers * count


def read_adapter_config(folder: str) -> dict[str, Any]:
    """The contents of a PEFT folder's adapter_config.json.

    Raises:
        UnsupportedModel: it is missing, is not one, or describes an adapter of another kind than plain LoRA.
    """
    file = local_model(folder) / ADAPTER_CONFIG
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        int(found["r"]), float(found["lora_alpha"]), list(found["target_modules"])
    except OSError:
        raise UnsupportedModel(f"{folder} has no {ADAPTER_CONFIG}; give the folder of a PEFT adapter") from None
    except (ValueError, KeyError, TypeError, RecursionError) as cause:
        raise UnsupportedModel(f"{file} does not describe an adapter: {cause!r}") from None
    for key, plain in PLAIN.items():
        if (value := found.get(key, plain)) != plain and (value or plain):
            raise UnsupportedModel(f"{file} has {key} {json.dumps(value)}, which is not available; use a plain LoRA")
    return dict(found)


def peft_config(arguments: LoraArguments, targets: Collection[str], base: str) -> dict[str, Any]:
    """The adapter_config.json of an adapter of the layers `targets` of the model `base`."""
    plain = {key: value for key, value in PLAIN.items() if key not in ("lora_bias", "layers_to_transform")}
    return plain | {
        "base_model_name_or_path": base,
        "task_type": "CAUSAL_LM",
        "r": arguments.lora_rank,
        "lora_alpha": arguments.lora_scale * arguments.lora_rank,
        "lora_dropout": 0.0,
        "target_modules": sorted(targets),
        "inference_mode": True,
    }


def not_fetched(model: LoraArguments) -> bool:
    """Whether the adapter to start from is given by a name that is not in the cache."""
    name = hub_name(model.adapter_name_or_path or "", "model")
    return name is not None and cached_folder(name) is None


def fill_in_adapter(config: BaseConfig) -> None:
    """Sets rank, alpha and layers from `adapter_name_or_path`, where they are not given.

    Of an adapter that is not fetched yet nothing is known, and all layers are taken to have one until it is.
    """
    model, path = config.actor_train.model_args, "actor_train.model_args"
    if model.adapter_name_or_path is None:
        return
    given = config.source.given
    if not_fetched(model) and f"{path}.lora_target" not in given:
        model.lora_target = [ALL_LINEAR]
    try:
        found = read_adapter_config(model.adapter_name_or_path)
    except UnsupportedModel:  # reported by `check_lora_model`
        return
    if f"{path}.lora_rank" not in given:
        model.lora_rank = int(found["r"])
    if f"{path}.lora_alpha" not in given:
        model.lora_alpha = float(found["lora_alpha"])
    if f"{path}.lora_target" not in given:
        model.lora_target = sorted(found["target_modules"])


def check_lora(config: BaseConfig) -> Iterator[Finding]:
    """Which roles have adapters, and their learning rate."""
    critic = getattr(config, "critic", None)
    if critic is not None and critic.model_args.trains_adapters:
        yield error("critic.model_args.lora_target", "a critic is trained in full; leave it out")
    model, path = config.actor_train.model_args, "actor_train.model_args.lora_target"
    if not model.trains_adapters:
        return
    if config.actor_train.value_head:
        yield error(path, "a reward model is trained in full; leave it out")
    if ALL_LINEAR in model.lora_target and len(model.lora_target) > 1:
        yield error(path, f"{ALL_LINEAR} stands for all layers; leave the other names out")
    if model.freeze_module_prefix:
        where = "actor_train.model_args.freeze_module_prefix"
        yield warning(where, "has no effect: with lora_target all weights of the model are frozen")
    yield from _check_reference(config)
    yield from _check_policies(config)
    rate = config.actor_train.training_args.learning_rate
    if rate < LOWEST_USUAL_RATE:
        yield warning(
            "actor_train.training_args.learning_rate",
            f"{rate:g} is low: adapters usually need about ten times the learning rate of full training",
        )


def _check_policies(config: Any) -> Iterator[Finding]:
    """Names and tags of several policies, and what they do without."""
    policies: Mapping[str, PolicyArguments] = config.policies
    owners: dict[str, str] = {}
    lowest = config.actor_train.training_args.min_learning_rate
    for name, policy in policies.items():
        if policy.learning_rate is not None and policy.learning_rate < lowest:
            message = f"{policy.learning_rate:g} is below min_learning_rate {lowest:g}; use at least that"
            yield error(f"policies.{name}.learning_rate", message)
        if not POLICY_NAME.fullmatch(name):
            yield error(f"policies.{name}", "names a folder and metrics; use letters, digits, - and _")
        if not policy.tags:
            yield error(f"policies.{name}.tags", "is empty; write the tags of its prompts")
        for tag in policy.tags:
            if owners.setdefault(tag, name) != name:
                yield error(f"policies.{name}.tags", f"{tag} is a tag of {owners[tag]} too; leave it out of one")
    if not policies or config.pipeline != "rlvr":
        return
    if config.actor_train.lora_update == "merged":
        message = "merged gives an engine the weights of one policy, and policies shares engines; use adapter"
        yield error("actor_train.lora_update", message)
    if config.actor_train.model_args.adapter_name_or_path is not None:
        path = "actor_train.model_args.adapter_name_or_path"
        yield error(path, "policies start from new adapters; leave it out")
    if config.uses_critic:
        yield error("adv_estimator", f"{config.adv_estimator} has a critic, and policies have none; use another one")
    if (steps := config.optimizer_steps_per_batch // config.ppo_epochs) > 1:
        path = "actor_train.training_args.gradient_accumulation_steps"
        now = config.actor_train.training_args.gradient_accumulation_steps
        yield error(path, f"{now} gives {steps} optimizer steps a batch, policies have one each; use {now * steps}")


def _check_reference(config: Any) -> Iterator[Finding]:
    """A reference without devices is the model below the adapters."""
    own = config.actor_train.model_args.model_name_or_path
    if base_is_reference(config) and (named := config.reference.model_args.model_name_or_path) not in (None, own):
        message = f"is empty, but {named} is not {own}, the model below the adapters; set its devices"
        yield error("reference.device_mapping", message)


def check_adapter_updates(config: RLConfig) -> Iterator[Finding]:
    """Engines that get adapters have the weights below them; no policy says what requests do, since they go on."""
    platform = "cpu" if config.platform == "cpu" else "cuda"
    if config.adapters(platform) is None:
        if config.actor_train.model_args.trains_adapters and merging_rounds(config):
            message = (
                "merged rounds small changes away, so engines sample from another policy; use adapter, or dtype fp32"
            )
            yield warning("actor_train.lora_update", message)
        return
    if why := without_base(config, platform):
        fix = "use merged"
        if config.policies:  # which merged cannot serve
            fix = "use load_format auto, the model of actor_train, and is_offload_states=false or other devices"
        yield error("actor_train.lora_update", f"adapter needs engines that load the model, and {why}; {fix}")
    certain = config.platform != "auto" or config.actor_train.lora_update == "adapter"
    if certain and "in_flight_policy" in config.source.given:
        message = f"{config.in_flight_policy} has no effect: with lora_update adapter a response keeps its adapter"
        yield warning("in_flight_policy", message)


def check_lora_model(config: BaseConfig) -> Iterator[Finding]:
    """The layers exist in the model, and the adapter to start from fits."""
    model, path = config.actor_train.model_args, "actor_train.model_args"
    if not model.trains_adapters:
        return
    try:
        shape = read_model_shape(local_model(model.model_name_or_path or ""))
    except UnsupportedModel:  # reported with the model
        shape = None
    if shape is not None and shape.experts:
        yield error(f"{path}.lora_target", "adapters of a mixture of experts are not available; train it in full")
    elif shape is not None:
        known = linear_names(shape)
        for name in model.lora_target:
            if name != ALL_LINEAR and name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                names = ", ".join(known)
                yield error(
                    f"{path}.lora_target", f"{name} is no linear layer of {shape.architecture}; {hint}known: {names}"
                )
    if model.adapter_name_or_path is not None:
        yield from _check_start(model, path, shape)


def _check_start(model: Any, path: str, shape: ModelShape | None) -> Iterator[Finding]:
    where = f"{path}.adapter_name_or_path"
    if not_fetched(model):
        return
    try:
        found = read_adapter_config(model.adapter_name_or_path)
    except UnsupportedModel as reason:
        yield error(where, str(reason))
        return
    if hub_name(model.adapter_name_or_path, "model") is None and not os.path.isfile(
        Path(model.adapter_name_or_path) / ADAPTER_WEIGHTS
    ):
        yield error(where, f"{model.adapter_name_or_path} has no {ADAPTER_WEIGHTS}; save the adapter as safetensors")
    if int(found["r"]) != model.lora_rank:
        yield error(
            f"{path}.lora_rank", f"{model.lora_rank} is not {found['r']}, the rank of the adapter; leave it out"
        )
    if model.lora_alpha is not None and float(found["lora_alpha"]) != model.lora_alpha:
        alpha = found["lora_alpha"]
        yield error(f"{path}.lora_alpha", f"{model.lora_alpha:g} is not {alpha:g}, that of the adapter; leave it out")
    named = found.get("base_model_name_or_path")
    if named and model.model_name_or_path and not same_model(named, model.model_name_or_path):
        yield error(where, f"was trained on {named}, pretrain is {model.model_name_or_path}; use an adapter of that")
    if shape is not None and model.lora_target != [ALL_LINEAR]:
        missing = sorted({*found["target_modules"]} ^ {*model.lora_target})
        if missing:
            yield error(f"{path}.lora_target", f"differs from the adapter's in {', '.join(missing)}; leave it out")


def same_model(one: str, other: str) -> bool:
    """Whether two names are of one model: the folder may have moved, or a name have no owner."""
    return one == other or Path(one).name == Path(other).name or local_model(one) == local_model(other)
