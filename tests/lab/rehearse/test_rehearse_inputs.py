"""Models, tokenizers and rows of a rehearsal."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import yaml

from roll.base.errors import RunError
from roll.configs.learning.lora import PolicyArguments
from roll.configs.pipeline import RLVRConfig
from roll.configs.scoring.built_in_rewards import BUILT_IN
from roll.configs.scoring.rewards import RewardConfig
from roll.datasets.prompts import load_prompts
from roll.datasets.sft import load_sft_data
from roll.datasets.templates import ConversationEncoder
from roll.datasets.tokenizer import load_tokenizer
from roll.lab.rehearse.inputs import (
    MOST_TOKENS,
    STAND_IN_TRUTHS,
    choose_rows,
    longest_messages,
    make_inputs,
    write_data,
)
from roll.lab.rehearse.model import find_tokenizer, recipe_model, stand_in_tokenizer, write_model
from roll.lab.rehearse.overrides import shrink
from roll.loading.load import build_config
from roll.models.families.registry import family_named, template_names
from roll.models.families.shape import read_model_shape
from roll.rewards.calling import RewardRequest
from roll.usercode.reward_process import load_reward_function
from tests.configs.samples import AGENTIC, MODEL, RLVR, SFT

REWARDS = "rewards:\n  math: {tag_included: [algebra, geometry]}\n  code: {tag_included: [code]}\n"


@pytest.mark.parametrize(
    ("name", "architecture", "tied"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen2ForCausalLM", True),
        ("/models/Qwen2.5-7B", "Qwen2ForCausalLM", False),
        ("Qwen/Qwen3-8B", "Qwen3ForCausalLM", False),
        ("meta-llama/Llama-3.2-1B", "LlamaForCausalLM", True),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "Qwen2ForCausalLM", True),
        ("output/demo/sft/hf_model", "Qwen2ForCausalLM", None),
    ],
)
def test_the_architecture_is_known_from_the_name(
    name: str, architecture: str, tied: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the demo makes a model of one of these names
    source = recipe_model(name)
    assert (source.family.architecture, source.settings.get("tie_word_embeddings")) == (architecture, tied)


def test_a_config_on_this_machine_decides() -> None:
    source = recipe_model(MODEL)
    assert source.basis == "its config.json" and source.settings["num_hidden_layers"] == 28


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_a_stand_in_tokenizer_works_with_every_template_after_saving(family: str, tmp_path: Path) -> None:
    name = {"qwen2": "Qwen2.5-7B", "qwen3": "Qwen3-8B", "llama": "Llama-3.1-8B"}[family]
    source = recipe_model(name)
    made = stand_in_tokenizer(family_named(family), ["</answer>"])
    folder = write_model(source, made, tmp_path / "model", seed=0)
    shape = read_model_shape(folder)
    assert shape is not None and shape.vocabulary == len(made) and shape.architecture == source.family.architecture
    tokenizer = load_tokenizer(str(folder))
    for template in template_names():
        if template != "none":
            ids = ConversationEncoder(tokenizer, template).start([{"role": "user", "content": "3 + 4 = ? ü"}])
            assert "3 + 4 = ? ü" in tokenizer.decode(ids)
    assert len(tokenizer.encode("</answer>", add_special_tokens=False)) == 1
    assert tokenizer.decode([tokenizer.eos_token_id]) in ("<|im_end|>", "<|eot_id|>")


def test_the_tokenizer_of_a_local_model_is_kept(tiny_model_dir: Path) -> None:
    tokenizer, why = find_tokenizer(recipe_model(str(tiny_model_dir)), [])
    assert why == "" and len(tokenizer) == len(load_tokenizer(str(tiny_model_dir)))


def test_a_stand_in_says_why(tmp_path: Path) -> None:
    assert "is not on this machine" in find_tokenizer(recipe_model("Qwen/Qwen2.5-7B"), [])[1]
    assert "has no tokenizer" in find_tokenizer(recipe_model(MODEL), [])[1]


def test_first_short_rows_are_chosen_and_one_of_every_kind() -> None:
    tokens = [MOST_TOKENS + 1, 10, 20, 30, 40, 50]
    assert choose_rows(tokens, ["a"] * 6, 3) == [1, 2, 3]
    assert choose_rows(tokens, ["a", "a", "a", "a", "a", "b"], 2) == [1, 5]
    assert choose_rows([900, 800, 700], ["a", "a", "a"], 2) == [1, 2], "all are too long: the shortest"


def write_rows(folder: Path, rows: list[dict[str, object]]) -> str:
    file = folder / "own.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def rlvr_config(file: str, more: str = "") -> RLVRConfig:
    config = build_config(yaml.safe_load(RLVR.replace("train.jsonl", file) + more))
    assert isinstance(config, RLVRConfig)
    return config


def test_own_rows_keep_their_columns_and_every_reward_gets_some(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"prompt": f"{n} + 1 = ?", "answer": str(n + 1), "tag": "code" if n == 50 else "algebra", "more": [n]}
        for n in range(60)
    ]
    config = rlvr_config(write_rows(tmp_path, rows), REWARDS)
    config.actor_train.data_args.ground_truth = "answer"
    data = write_data(config, "actor_train", stand_in_tokenizer(family_named("qwen2")), tmp_path / "data", 8)
    written = [json.loads(line) for line in Path(data.files[0]).read_text().splitlines()]
    assert written == [*rows[:7], rows[50]]
    assert data.reason == "the first rows of its own files" and data.prompt_tokens > 20
    prompts = load_prompts(data.files, config.actor_train.data_args)
    assert {prompt.tag for prompt in prompts} == {"algebra", "code"}


def test_stand_in_rows_have_the_columns_of_the_recipe_and_every_tag(tmp_path: Path) -> None:
    config = rlvr_config("/nowhere/problems.jsonl", REWARDS)
    config.actor_train.data_args.prompt = "question"
    data = write_data(config, "actor_train", stand_in_tokenizer(family_named("qwen2")), tmp_path, 8)
    assert data.reason == "/nowhere/problems.jsonl is not on this machine: stand-in rows"
    prompts = load_prompts(data.files, config.actor_train.data_args)
    assert len(prompts) == 8
    assert {prompt.tag for prompt in prompts} == {"algebra", "geometry", "code"}
    for prompt in prompts:
        first, second = (prompt.question.text or "").rstrip("=").split("+")
        assert int(first) + int(second) == int(prompt.ground_truth) < 10


@pytest.mark.parametrize("file", [None, "/nowhere/problems.jsonl"], ids=["own rows", "stand-in rows"])
def test_every_policy_gets_rows(file: str | None, tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"prompt": "1 + 1 = ?", "ground_truth": "2", "tag": "b" if n == 50 else "a"} for n in range(60)
    ]
    config = rlvr_config(file or write_rows(tmp_path, rows))
    config.policies = {"one": PolicyArguments(tags=["a"]), "two": PolicyArguments(tags=["b"])}
    data = write_data(config, "actor_train", stand_in_tokenizer(family_named("qwen2")), tmp_path / "data", 8)
    assert {prompt.tag for prompt in load_prompts(data.files, config.actor_train.data_args)} == {"a", "b"}


def test_stand_in_pairs_of_sft_have_answers(tmp_path: Path) -> None:
    config = build_config(yaml.safe_load(SFT))
    data = write_data(config, "actor_train", stand_in_tokenizer(family_named("qwen2")), tmp_path, 16)
    pairs = load_sft_data(data.files, config.actor_train.data_args)
    assert len(pairs) == 16 and all(pair.response for pair in pairs)
    assert data.sequence_tokens > data.prompt_tokens


def test_messages_of_agents_are_bounded() -> None:
    config = build_config(yaml.safe_load(AGENTIC))
    first, between = longest_messages(config)  # type: ignore[arg-type]
    assert first > between > 200


def test_an_environment_that_fails_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from roll.envs import TextEnv\n\n\nclass Broken(TextEnv):\n    def rules(self):\n        return ''\n\n"
    code += "    def begin(self):\n        return 'go'\n\n    def act(self, text):\n        return 1 / 0\n"
    (tmp_path / "my_broken_env.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = build_config(yaml.safe_load(AGENTIC.replace("env_type: sokoban", "env_type: 'my_broken_env:Broken'")))
    with pytest.raises(RunError, match=r"my_broken_env.py:12: ZeroDivisionError"):
        make_inputs(config, tmp_path / "out", 2, lambda text: None)


@pytest.mark.parametrize("engine", ["megatron_infer", "sglang"])
def test_the_stand_in_of_a_reward_model_gives_scores(tmp_path: Path, engine: str) -> None:
    from transformers import AutoModelForSequenceClassification

    reward = {"device_mapping": [0], "model_args": {"model_name_or_path": "RLHFlow/Llama3-8B-rm"}}
    reward |= {"strategy_args": {"strategy_name": engine}}
    tree = yaml.safe_load(RLVR) | {"rewards": {"reward_model": {"template": "llama3"}}, "reward": reward}
    config = build_config(tree)
    inputs = make_inputs(config, tmp_path / "out", 2, lambda text: None)
    folder = inputs.models["RLHFlow/Llama3-8B-rm"]
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert model.num_labels == 1 and float(model.score.weight.detach().abs().min()) > 0
    small = build_config(shrink(config, inputs, str(tmp_path / "run"), 2).tree)
    assert isinstance(small, RLVRConfig)
    assert small.reward.model_args.model_name_or_path == folder
    assert small.reward.strategy_args.strategy_name == engine
    assert small.rewards["reward_model"].template == "native", "the stand-in has the tokenizer of the policy"


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name not in ("llm_judge", "reward_model")])
def test_every_reward_that_is_a_function_can_read_its_stand_in_truth(name: str) -> None:
    config = RewardConfig(function=BUILT_IN[name].function, timeout_s=60.0)
    _, function = load_reward_function(config)
    request = RewardRequest(("```python\nprint(3)\n```",), STAND_IN_TRUTHS.get(name, "3"))
    value = function.call(request, 0)
    [outcome] = function.outcomes(asyncio.run(value) if function.is_async else value, None)
    assert outcome.reason is None, outcome.detail


def test_stand_in_truths_belong_to_built_in_rewards() -> None:
    assert STAND_IN_TRUTHS.keys() <= BUILT_IN.keys()
