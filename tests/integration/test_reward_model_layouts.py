"""The reward model that each layout trains and exports, against transformers."""

from __future__ import annotations

import json
import math

import pytest
import torch

from roll.configs.devices.parallel_layout import ParallelLayout
from roll.models.tiny import write_tiny_model
from tests.integration.reward_scenario import CENTERING, PAD, STEPS, TRAINING, sequences
from tests.integration.test_critic_model import write_reward_model
from tests.integration.test_megatron_strategy import tensors_of

pytestmark = pytest.mark.integration

LAYOUTS = {
    "tp2": (ParallelLayout(tensor=2), {"sequence_parallel": True}, False),
    "pp2": (ParallelLayout(pipeline=2), {}, True),
}
NAMES = ("language", "token", "sequence")
FROZEN = ("token", "sequence")
"""Models that are also those of a role `reward`, with and without a bias."""


def write_tokenizer(folder):
    """Words t0 to t100, of which the first is the padding."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({f"t{number}": number for number in range(101)}, unk_token="t1"))
    words = {"pad_token": f"t{PAD}", "unk_token": "t1", "eos_token": "t2"}
    PreTrainedTokenizerFast(tokenizer_object=core, **words).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    folders = {
        "language": write_tiny_model(root / "language", "qwen2", tie_word_embeddings=True),
        "token": write_reward_model(root / "token", "Token", bias=True),
        "sequence": write_reward_model(root / "sequence", "Sequence", bias=False),
    }
    return {name: write_tokenizer(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def run(models, rank_pool, tmp_path_factory):
    """Results of a layout's ranks and the folder they wrote; each layout runs once, both side by side."""
    folders = {layout: tmp_path_factory.mktemp(layout) for layout in LAYOUTS}
    running = {
        layout: rank_pool.start(
            "tests.integration.reward_scenario:run",
            sizes,
            folders[layout],
            models=models,
            megatron=megatron,
            packed=packed,
            frozen=FROZEN,
        )
        for layout, (sizes, megatron, packed) in LAYOUTS.items()
    }
    return lambda layout: (running[layout].result(), folders[layout])


def classifier(folder):
    """The model of transformers that rates whole sequences."""
    import transformers

    return transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)


def rewards_of(model):
    """Rewards of transformers, which finds the last token of a padded sequence by itself."""
    rows = sequences()
    ids = torch.full((len(rows), max(map(len, rows)) + 2), model.config.pad_token_id)
    for row, tokens in zip(ids, rows, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    mask = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
    return model(input_ids=ids, attention_mask=mask.long()).logits.squeeze(-1)


def last_values(folder, kind):
    """Values of transformers at the last token of each sequence, which it reads alone."""
    import transformers

    model = getattr(transformers, f"AutoModelFor{kind}Classification").from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return torch.stack([model(input_ids=torch.tensor([row])).logits.flatten()[-1] for row in sequences()])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("state", ["", "trained "])
def test_transformers_gives_the_same_rewards_as_the_exported_model(run, layout, name, state):
    ranks, folder = run(layout)
    rewards = ranks[-1][f"rewards/{state}{name}"]
    if state or name != "language":
        assert rewards.std() > 1e-3
    with torch.no_grad():
        expected = rewards_of(classifier(folder / f"{state}{name}"))
    torch.testing.assert_close(expected, rewards, atol=1e-4, rtol=0)
    config = json.loads((folder / f"{state}{name}" / "config.json").read_text())
    family = "Qwen2" if name == "language" else "Qwen3"
    assert config["architectures"] == [f"{family}ForSequenceClassification"]
    assert config["pad_token_id"] == PAD and len(config["id2label"]) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FROZEN)
def test_a_frozen_reward_model_gives_the_values_of_transformers_at_the_last_token(run, models, layout, name):
    ranks, _ = run(layout)
    rewards = ranks[-1][f"rewards/frozen {name}"]
    assert rewards.std() > 1e-3
    expected = last_values(models[name], name.capitalize())
    torch.testing.assert_close(rewards, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_an_exported_reward_model_has_the_weights_it_started_from_and_no_bias(run, models, layout, name):
    ranks, folder = run(layout)
    before, after = tensors_of(models[name]), tensors_of(folder / name)
    assert after.keys() == before.keys() - {"lm_head.weight", "score.bias"} | {"score.weight"}
    assert all(torch.equal(after[key], before[key]) for key in after.keys() & before.keys())
    assert not any("bias" in key for rank in ranks for key in rank[f"parameters/{name}"] if "value_head" in key)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_reward_model_that_starts_from_a_language_model_has_rewards_of_0(run, layout):
    ranks, _ = run(layout)
    assert (ranks[-1]["rewards/language"] == 0).all()
    first = ranks[-1]["steps/language"][0]
    assert first["loss"] == pytest.approx(math.log(2)) and first["accuracy"] == first["margin"] == 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_the_first_step_is_that_of_torch_on_the_model_of_transformers(run, layout, name):
    ranks, folder = run(layout)
    model = classifier(folder / name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.get_input_embeddings().padding_idx = None  # its gradient of the padding token would be 0; sequences have it
    rewards = rewards_of(model)
    chosen, rejected = rewards[0::2], rewards[1::2]
    loss = (torch.log1p(torch.exp(rejected - chosen)) + CENTERING * (chosen + rejected) ** 2).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.Adam(model.parameters(), TRAINING["learning_rate"], eps=TRAINING["adam_epsilon"]).step()
    for rank in ranks:
        ours = rank[f"steps/{name}"][0]
        assert ours["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    after, expected = tensors_of(folder / f"first {name}"), model.state_dict()
    assert after.keys() == expected.keys()
    assert not torch.equal(expected["score.weight"], before["score.weight"])
    for key, value in after.items():
        torch.testing.assert_close(value, expected[key], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_every_layout_takes_the_same_steps_and_the_loss_falls(run, name):
    (one, *_), (two, *_) = run("tp2")[0], run("pp2")[0]
    for step in range(STEPS):
        ours, theirs = one[f"steps/{name}"][step], two[f"steps/{name}"][step]
        for key in ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward", "grad_norm"):
            assert ours[key] == pytest.approx(theirs[key], rel=2e-3, abs=1e-3), key
    losses = [step["loss"] for step in one[f"steps/{name}"]]
    assert losses[-1] < losses[0]
