"""Memory of the planned recipes against closed forms worked out by hand and figures that others published."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from roll.base.errors import ConfigError
from roll.base.text import gibibytes
from roll.models.families.shape import read_model_shape
from roll.plan.plan import make_plan, needed_memory, shared_device_memory, what_stops
from roll.plan.show import print_plan
from tests.configs.samples import DATA, RLVR, SERVER, bytes_of, memory, rlvr

MEGATRON = "actor_train.strategy_args.strategy_config"
GIB = 2**30
H100 = 80 * GIB
TOKENS = 4096
TEXT = RLVR.replace("prompt_length: 2048", "prompt_length: 1024").replace(
    "response_length: 1024", "response_length: 3072"
)


class Model(NamedTuple):
    """Published sizes; `hidden` is also the width of all query heads."""

    layers: int
    hidden: int
    kv: int
    ffn: int
    vocabulary: int
    tied: bool


MODELS = {
    "0.5B": Model(24, 896, 2 * 64, 4864, 151_936, True),
    "7B": Model(28, 3584, 4 * 128, 18_944, 152_064, False),
    "32B": Model(64, 5120, 8 * 128, 27_648, 152_064, False),
}


class Recipe(NamedTuple):
    """A layout; trainer and engines share `gpus` unless half of them are `separate`."""

    model: str
    gpus: int
    tensor: int = 1
    stages: tuple[int, ...] = ()
    """Layers of each pipeline stage."""
    virtual: int = 1
    separate: bool = False
    full: bool = False
    offload: float = 0.0
    engine: int = 1
    options: tuple[str, ...] = ()

    def overrides(self) -> list[str]:
        train = self.gpus // 2 if self.separate else self.gpus
        first = train if self.separate else 0
        values = [
            f"pretrain={DATA / 'models' / f'qwen2.5-{self.model}'}",
            "platform=cuda",
            "num_devices_per_node=8",
            "async_generation_ratio=0",
            "rollout_batch_size=64",
            f"actor_train.device_mapping=0-{train - 1}",
            f"actor_infer.device_mapping={first}-{first + train - 1}",
            f"actor_infer.num_gpus_per_worker={self.engine}",
            "actor_train.training_args.gradient_accumulation_steps=8",
            "actor_train.infer_batch_size=1",
            f"{MEGATRON}.tensor_model_parallel_size={self.tensor}",
            f"{MEGATRON}.sequence_parallel={str(self.tensor > 1).lower()}",
            f"{MEGATRON}.pipeline_model_parallel_size={len(self.stages) or 1}",
        ]
        values += [f"{MEGATRON}.{option}" for option in self.options]
        values += [f"{MEGATRON}.virtual_pipeline_model_parallel_size={self.virtual}"] * (self.virtual > 1)
        values += [f"{MEGATRON}.recompute_granularity=full"] * self.full
        if self.offload:
            values += [
                f"{MEGATRON}.optimizer_cpu_offload=true",
                f"{MEGATRON}.optimizer_offload_fraction={self.offload}",
            ]
        return values


UNEVEN = ("num_layers_in_first_pipeline_stage=15", "num_layers_in_last_pipeline_stage=15")

RECIPES = {
    "0.5B on 1": Recipe("0.5B", 1),
    "0.5B on 8": Recipe("0.5B", 8),
    "0.5B on 64, separate": Recipe("0.5B", 64, separate=True),
    "7B on 1, optimizer in host memory": Recipe("7B", 1, full=True, offload=1.0),
    "7B on 8": Recipe("7B", 8, tensor=2),
    "7B on 8, separate": Recipe("7B", 8, tensor=4, separate=True),
    "7B on 64": Recipe("7B", 64, tensor=2, stages=(14, 14)),
    "32B on 8, optimizer in host memory": Recipe("32B", 8, tensor=8, full=True, offload=1.0, engine=4),
    "32B on 8, half of the optimizer in host memory": Recipe("32B", 8, tensor=8, full=True, offload=0.5, engine=4),
    "32B on 64": Recipe("32B", 64, tensor=8, stages=(32, 32), engine=4),
    "32B on 64, virtual stages": Recipe("32B", 64, tensor=8, stages=(16,) * 4, virtual=2, engine=4),
    "32B on 64, separate, uneven": Recipe("32B", 64, 8, (15, 17, 17, 15), separate=True, engine=8, options=UNEVEN),
}


def by_hand(recipe: Recipe) -> tuple[float, float]:
    """Bytes of states, and of all, on the fullest device of the trainer.

    States: 2 + 4 + 12 B per parameter, the last over data-parallel ranks (Megatron-LM, theoretical_memory_usage.py).
    Activations: table 2 and section 4 of "Reducing Activation Recomputation in Large Transformer Models"
    (arXiv:2205.05198) without dropout and scores, for grouped queries and a gated MLP: per token and layer 12 h + 4 kv
    + 6 f B over the tensor-parallel ranks, or 2 h with full recomputation and one whole layer; p - stage micro-batches
    are in flight, with virtual stages p (1 + (p - 1) / (p v)) on the first.
    Output head: two chunks of 512 MiB of logits, and 4 + 2 B for each gradient of its weights.
    """
    model = MODELS[recipe.model]
    stages, h = recipe.stages or (model.layers,), model.hidden
    train = recipe.gpus // 2 if recipe.separate else recipe.gpus
    shards, last = train // recipe.tensor // len(stages), len(stages) - 1
    matrices = 2 * h * (h + model.kv) + 3 * h * model.ffn
    layer = TOKENS * (12 * h + 4 * model.kv + 6 * model.ffn)
    totals = []
    for stage, layers in enumerate(stages):
        tables = (stage == 0) + (stage == last and not (model.tied and last == 0))
        count = (layers * matrices + tables * model.vocabulary * h) / recipe.tensor
        states = count * (6 + 12 * (1 - recipe.offload) / shards)
        in_flight = len(stages) - stage
        if recipe.virtual > 1:
            in_flight += (len(stages) - 1 - 2 * stage + stage * recipe.virtual) / recipe.virtual
        activations = in_flight * layers * layer
        if recipe.full:
            activations = layers * TOKENS * 2 * h + layer
        head = 2 * 512 * 2**20 + 6 * model.vocabulary * h / recipe.tensor if stage == last else 0
        totals.append((states + activations / recipe.tensor + head, states))
    total, states = max(totals)
    return states, total


@pytest.mark.parametrize("name", RECIPES)
def test_a_trainer_needs_what_the_papers_count(tmp_path: Path, name: str) -> None:
    recipe = RECIPES[name]
    plan = memory(make_plan(rlvr(tmp_path, *recipe.overrides(), text=TEXT), SERVER), "actor_train")
    states, total = by_hand(recipe)
    assert sum(line.bytes for line in plan.lines[:3]) == pytest.approx(states, rel=0.01)
    assert plan.total == pytest.approx(total, rel=0.1)


@pytest.mark.parametrize("name", [name for name in RECIPES if not RECIPES[name].separate])
def test_phases_of_shared_gpus_are_sums_of_lines_and_fit(tmp_path: Path, name: str) -> None:
    plan = make_plan(rlvr(tmp_path, *RECIPES[name].overrides(), text=TEXT), SERVER)
    train, weights = memory(plan, "actor_train").total, bytes_of(plan, "actor_train", "weights")
    update, generate = weights + bytes_of(plan, "actor_infer", "weights"), memory(plan, "actor_infer").total
    graphs = bytes_of(plan, "actor_infer", "CUDA graphs")
    phases = (train + graphs, update + graphs, generate)
    (sentence,) = shared_device_memory(plan)
    away = weights + bytes_of(plan, "actor_train", "optimizer")
    away += sum(line.bytes for line in memory(plan, "actor_train").host)
    shown = [gibibytes(size) for size in (*phases, away, away * min(RECIPES[name].gpus, 8))]
    assert needed_memory(plan) == {"actor_train + actor_infer": max(phases)}
    assert re.findall(r"[\d.]+ [GM]iB", sentence) == shown
    assert max(phases) < H100


def test_the_printed_plan_shows_phases_and_host_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = RECIPES["32B on 8, optimizer in host memory"]
    plan = make_plan(rlvr(tmp_path, *recipe.overrides(), text=TEXT), SERVER)
    print_plan(plan, device_gib=48)
    print_plan(plan, device_gib=47)
    assert not what_stops(plan, 48, elsewhere=True) and len(what_stops(plan, 47, elsewhere=True)) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "25.22 GiB while training, 23.59 GiB during an update, 47.96 GiB while generating" in shown
    assert "optimizer in host memory 61.04 GiB" in shown
    assert "with 68.67 GiB in host memory meanwhile, 549.32 GiB on a node" in shown
    assert "actor_train + actor_infer need on one device at least 47.96 GiB at once, of 48 GiB" in shown
    assert "actor_train + actor_infer need on one device at least 47.96 GiB at once, more than the 47 GiB" in shown


def test_cuda_graphs_are_those_of_the_requests_and_prompts_that_sglang_captures(tmp_path: Path) -> None:
    options = "actor_infer.strategy_args.strategy_config"
    for overrides, mib in {
        ("actor_infer.max_running_requests=1000",): 2 * 256 + 58 * 8,
        ("actor_infer.max_running_requests=1000", "actor_infer.num_gpus_per_worker=4"): 2 * 512 + 58 * 8,
        ("actor_infer.max_running_requests=16",): 2 * 16 + 58 * 8,
        (f"{options}.cuda_graph_max_bs_decode=32",): 2 * 32 + 58 * 8,
        (f"{options}.disable_prefill_cuda_graph=true", "actor_infer.max_running_requests=8"): 2 * 8,
        (f"{options}.disable_decode_cuda_graph=true",): 58 * 8,
    }.items():
        plan = make_plan(rlvr(tmp_path, *Recipe("7B", 8).overrides(), *overrides, text=TEXT), SERVER)
        assert bytes_of(plan, "actor_infer", "CUDA graphs") == mib * 2**20
    for override in (f"{options}.disable_cuda_graph=true", "platform=cpu"):
        plan = make_plan(rlvr(tmp_path, *Recipe("7B", 8).overrides(), override, text=TEXT), SERVER)
        assert "CUDA graphs" not in [line.name for line in memory(plan, "actor_infer").lines]


def test_an_engine_beside_the_trainer_takes_its_share_of_what_the_states_leave_free(tmp_path: Path) -> None:
    share = "actor_infer.strategy_args.strategy_config.mem_fraction_static"
    beside = [*Recipe("0.5B", 1).overrides(), "async_generation_ratio=1"]
    for value in (0.2, 0.6):
        plan = make_plan(rlvr(tmp_path, *beside, f"{share}={value}", text=TEXT), SERVER)
        states = sum(bytes_of(plan, "actor_train", name) for name in ("weights", "gradients", "optimizer"))
        engine = bytes_of(plan, "actor_infer", "weights") + bytes_of(plan, "actor_infer", "KV cache")
        rest = memory(plan, "actor_train").total + bytes_of(plan, "actor_infer", "CUDA graphs")
        needed = max(states + engine / value, rest / (1 - value))
        assert needed_memory(plan) == {"actor_train + actor_infer": int(needed)}
        (sentence,) = shared_device_memory(plan)
        assert sentence.endswith(f"; with mem_fraction_static {value} the device needs {gibibytes(int(needed))}")
    for mode in ("async_generation_ratio=1", "is_offload_states=false"):
        with pytest.raises(ConfigError, match="mem_fraction_static: is not set, and the engine would take most"):
            make_plan(rlvr(tmp_path, *Recipe("0.5B", 1).overrides(), mode, text=TEXT), SERVER)


def test_the_larger_of_the_training_and_the_log_prob_pass_counts(tmp_path: Path) -> None:
    values = [*Recipe("7B", 8, tensor=2, full=True).overrides(), "old_log_probs_source=recompute"]
    for batch, tokens in ((16, 16 * TOKENS), (64, 64 * TOKENS)):
        plan = make_plan(rlvr(tmp_path, *values, f"actor_train.infer_batch_size={batch}", text=TEXT), SERVER)
        assert bytes_of(plan, "actor_train", "activations") == tokens * (4 * 3584 + 3 * 18_944 // 2) * 2
    plan = make_plan(rlvr(tmp_path, *Recipe("7B", 8, tensor=2).overrides(), "old_log_probs_source=recompute"), SERVER)
    assert bytes_of(plan, "actor_train", "activations") > 3072 * 28 * LAYER * 2
    separate = [*Recipe("7B", 8, tensor=2, full=True, separate=True).overrides(), "async_generation_ratio=1"]
    plan = make_plan(rlvr(tmp_path, *separate, "actor_train.infer_batch_size=64", text=TEXT), SERVER)
    assert bytes_of(plan, "actor_train", "activations") < TOKENS * 28 * LAYER * 2


def test_as_many_micro_batches_are_in_flight_as_a_token_limit_may_make(tmp_path: Path) -> None:
    recipe = Recipe("7B", 8, 2, (7, 7, 7, 7))
    limit = ["actor_train.use_dynamic_batching_in_train=true", "actor_train.max_tokens_per_microbatch_in_train=4096"]
    one = [*recipe.overrides(), "actor_train.training_args.gradient_accumulation_steps=1"]
    sizes = [*one, "actor_train.training_args.per_device_train_batch_size=8", *limit]
    plans = [make_plan(rlvr(tmp_path, *values, text=TEXT), SERVER) for values in (recipe.overrides(), sizes)]
    assert memory(plans[0], "actor_train") == memory(plans[1], "actor_train")
    whole = [*sizes[:-1], f"actor_train.max_tokens_per_microbatch_in_train={8 * TOKENS}"]
    of_one = memory(make_plan(rlvr(tmp_path, *whole, text=TEXT), SERVER), "actor_train").lines[3]
    assert f"{8 * TOKENS:,} tokens x (1 in flight" in of_one.formula


def test_megatron_splits_key_value_heads_over_more_ranks_and_an_engine_repeats_them(tmp_path: Path) -> None:
    config = json.loads((DATA / "models" / "qwen2.5-0.5B" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 16, "hidden_size": 1024}))
    shape = read_model_shape(tmp_path)
    assert shape is not None
    rows = 18 * 64 + 2 * 2 * 64 - 2 * 64
    assert shape.qkv_rows == rows
    others = 16 * 64 // 8 * 1024 + 3 * 1024 * 4864 // 8 + 2 * 1024
    assert shape.layer_parameters(8) == rows // 8 * (1024 + 1) + others
    assert shape.layer_parameters(8, repeats_kv=True) == (16 // 8 + 2) * 64 * (1024 + 1) + others


def test_roles_that_share_a_device_compute_in_turns(tmp_path: Path) -> None:
    values = [*Recipe("7B", 8, tensor=2).overrides(), "use_kl_loss=true", "kl_loss_coef=0.1"]
    values += ["reference.device_mapping=0-7"]
    plan = make_plan(rlvr(tmp_path, *values, text=TEXT), SERVER)
    (sentence,) = shared_device_memory(plan)
    training = memory(plan, "actor_train").total + bytes_of(plan, "reference", "weights")
    training += bytes_of(plan, "actor_infer", "CUDA graphs")
    assert f"{gibibytes(training)} while training" in sentence


def test_a_reward_model_stays_on_its_device_in_every_phase(tmp_path: Path) -> None:
    config = json.loads((DATA / "models" / "qwen2.5-7B" / "config.json").read_text())
    config |= {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "score"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    values = [*Recipe("7B", 8, tensor=2).overrides(), "rewards={reward_model: {}}", "reward.device_mapping=0-7"]
    values += [f"reward.model_args.model_name_or_path={tmp_path}"]
    plan = make_plan(rlvr(tmp_path, *values, text=TEXT), SERVER)
    (sentence,) = shared_device_memory(plan)
    stays = memory(plan, "reward").total
    rows = 152_064 * 3584 - 3584  # of the vocabulary, where there is one of scores
    assert bytes_of(plan, "reward", "weights") == 2 * (7_615_616_512 - rows)
    training = memory(plan, "actor_train").total + bytes_of(plan, "actor_infer", "CUDA graphs") + stays
    generation = memory(plan, "actor_infer").total + stays
    assert f"{gibibytes(training)} while training" in sentence
    assert f"{gibibytes(generation)} while generating" in sentence
    assert needed_memory(plan) == {"actor_train + actor_infer + reward": max(training, generation)}


def test_a_judge_has_memory_for_sequences_of_its_own_length_and_stays_on_shared_devices(tmp_path: Path) -> None:
    values = [*Recipe("7B", 8, tensor=2).overrides(), "rewards={llm_judge: {}}", "judge.num_gpus_per_worker=2"]
    values += [f"judge.model_args.model_name_or_path={DATA / 'models' / 'qwen2.5-7B'}", "judge.device_mapping=0-7"]
    values += ["judge.sequence_length=3000", "judge.max_running_requests=10"]
    plan = make_plan(rlvr(tmp_path, *values, text=TEXT), SERVER)
    assert bytes_of(plan, "judge", "KV cache") == 10 * 3000 * 2 * 28 * 256 * 2
    (sentence,) = shared_device_memory(plan)
    generation = memory(plan, "actor_infer").total + memory(plan, "judge").total
    assert f"{gibibytes(generation)} while generating" in sentence


def test_32b_does_not_fit_one_gpu(tmp_path: Path) -> None:
    recipe = Recipe("32B", 1, full=True, offload=1.0)
    plan = memory(make_plan(rlvr(tmp_path, *recipe.overrides(), text=TEXT), SERVER), "actor_train")
    assert plan.total > 2 * H100 and plan.host[0].bytes == 16 * 32_763_876_352


def test_published_estimate_of_16_billion_parameters(tmp_path: Path) -> None:
    """github.com/flagos-ai/FlagScale pull request 454, case 1: Qwen2.5 of 16.42 billion parameters, TP 4, DP 2."""
    config = json.loads((DATA / "models" / "qwen2.5-32B" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 54, "intermediate_size": 13_824}))
    recipe = Recipe("32B", 8, tensor=4)
    plan = make_plan(rlvr(tmp_path, *recipe.overrides(), f"pretrain={tmp_path}", text=TEXT), SERVER)
    train, mib = memory(plan, "actor_train"), 2**20
    assert bytes_of(plan, "actor_train", "weights") / 2 == pytest.approx(4.1055e9, rel=0.001)
    assert sum(line.bytes for line in train.lines[:3]) == pytest.approx(46_983.28 * mib, rel=0.001)
    assert train.total == pytest.approx(55_972.29 * mib, rel=0.1)


@pytest.mark.parametrize(("tensor", "offload", "fits"), [(2, True, True), (2, False, False), (4, False, True)])
def test_7b_fits_8_gpus_where_it_did_in_a_published_table(
    tmp_path: Path, tensor: int, offload: bool, fits: bool
) -> None:
    """The rows 9, 10 and 7 of grpo_qwen2.5_7b.csv in github.com/ISEEKYAN/verl_megatron_practice.

    8 H100s, 10,240 tokens in a micro-batch, engines with 0.6 of the memory. Without offload the trainer's states stay
    while they generate; 2 % are left for the CUDA contexts.
    """
    values = [*Recipe("7B", 8, tensor=tensor).overrides(), "prompt_length=2048", "response_length=8192"]
    train = memory(make_plan(rlvr(tmp_path, *values, text=TEXT), SERVER), "actor_train")
    states = sum(line.bytes for line in train.lines[:3])
    while_generating = 0.6 * H100 + (0 if offload else states)
    assert train.total < H100
    assert (while_generating < 0.98 * H100) == fits, while_generating / GIB


LAYER = 12 * 3584 // 2 // 2 + 2 * 512 // 2 + 3 * 18_944 // 2
"""Values of 7B per token and layer at TP 2 with sequence parallel."""


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ("recompute_granularity: selective", 28 * LAYER),
        ("recompute_granularity: selective, recompute_modules: [mlp]", 28 * (LAYER - 30_208) + 30_208),
        ("recompute_granularity: full, recompute_num_layers: 4", 6 * 1792 + 4 * LAYER),
        ("recompute_granularity: full, recompute_method: block, recompute_num_layers: 8", 8 * 1792 + 20 * LAYER),
        ("recompute_granularity: full, recompute_method: block, recompute_num_layers: 28", 27 * 1792 + LAYER),
        ("bias_activation_fusion: false", 28 * (LAYER + 18_944 // 2)),
    ],
)
def test_recomputation_keeps_fewer_activations(tmp_path: Path, options: str, values: int) -> None:
    chosen = (f"{MEGATRON}.{option.replace(': ', '=')}" for option in options.split(", "))
    plan = make_plan(rlvr(tmp_path, *Recipe("7B", 8, tensor=2).overrides(), *chosen, text=TEXT), SERVER)
    assert bytes_of(plan, "actor_train", "activations") == TOKENS * (values + 1792) * 2


@pytest.mark.parametrize(
    ("options", "each"),
    [
        ("use_distributed_optimizer: false", 12 * 4),
        ("use_precision_aware_optimizer: true", 2 + 4 + 4),
        ("use_precision_aware_optimizer: true, exp_avg_dtype: bf16, exp_avg_sq_dtype: bf16", 2 + 2 + 2),
        ("accumulate_allreduce_grads_in_fp32: false", 12 + 4),
        ("optimizer_cpu_offload: true, optimizer_offload_fraction: 0.75", 3),
    ],
)
def test_dtypes_and_shards_of_the_optimizer(tmp_path: Path, options: str, each: int) -> None:
    chosen = (f"{MEGATRON}.{option.replace(': ', '=')}" for option in options.split(", "))
    plan = make_plan(rlvr(tmp_path, *Recipe("7B", 8, tensor=2).overrides(), *chosen, text=TEXT), SERVER)
    assert bytes_of(plan, "actor_train", "optimizer") == each * 3_807_910_400 // 4


def test_fp32_training_has_no_second_copy_of_the_weights(tmp_path: Path) -> None:
    plan = make_plan(rlvr(tmp_path, "actor_train.model_args.dtype=fp32", "actor_infer.model_args.dtype=fp32"), SERVER)
    assert bytes_of(plan, "actor_train", "weights") == 4 * 3_807_910_400
    assert bytes_of(plan, "actor_train", "optimizer") == 8 * 3_807_910_400 // 8


def test_the_head_has_larger_chunks_on_gpus_and_one_for_gradients(tmp_path: Path) -> None:
    plan = make_plan(rlvr(tmp_path), SERVER)
    weights, states = 152_064 // 2 * 3584, 2 * 3072 * 3584 * 2
    assert bytes_of(plan, "actor_train", "head gradient") == weights * (4 + 2) + states
    logits, chunk = 3072 * 152_064 // 2 * 4, 512 * 2**20
    assert logits > chunk and bytes_of(plan, "actor_train", "output head") == 2 * chunk
    on_cpu = make_plan(rlvr(tmp_path, "platform=cpu", "num_devices_per_node=24"), SERVER)
    assert bytes_of(on_cpu, "actor_train", "output head") == 64 * 2**20
    assert bytes_of(on_cpu, "actor_train", "head gradient") == weights * (4 + 2) + states


def test_context_ranks_share_activations_head_and_optimizer(tmp_path: Path) -> None:
    sizes = [f"{MEGATRON}.context_parallel_size={size}" for size in (1, 2)]
    recipe = Recipe("7B", 8).overrides()
    one, two = (make_plan(rlvr(tmp_path, *recipe, size, text=TEXT), SERVER) for size in sizes)
    assert bytes_of(two, "actor_train", "activations") == bytes_of(one, "actor_train", "activations") // 2
    assert bytes_of(two, "actor_train", "optimizer") == bytes_of(one, "actor_train", "optimizer")
    gathered = next(line for line in memory(two, "actor_train").lines if line.name == "context gather")
    assert gathered.formula.startswith("4,096 tokens of 2 context ranks x (3 x 2 x 512 keys and values x 2 B")


def test_the_tokens_of_a_teacher_count_with_the_training_pass(tmp_path: Path) -> None:
    teacher = (
        "adv_estimator=opd",
        "reference.device_mapping=0-15",
        "reference.model_args.model_name_or_path=a/teacher",
    )
    plain, distilled = (make_plan(rlvr(tmp_path, *teacher, *more), SERVER) for more in ((), ("opd_top_k=64",)))
    assert bytes_of(distilled, "actor_train", "teacher's tokens") == 3072 * 64 * 48
    names = [line.name for each in plain.memory if each.role == "actor_train" for line in each.lines]
    assert "output head" in names and "teacher's tokens" not in names


def test_kv_cache_of_the_requests_one_engine_runs(tmp_path: Path) -> None:
    plan = make_plan(rlvr(tmp_path), SERVER)
    assert bytes_of(plan, "actor_infer", "KV cache") == 64 * 3072 * 2 * 28 * 4 * 128 * 2
    assert bytes_of(plan, "actor_infer", "weights") == 2 * 7_615_616_512
