"""The weights of a model folder are compared with its config.json before any process starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from roll.models.families.hf_config import UnsupportedModel
from roll.models.tiny import write_tiny_model
from roll.models.weight_files import NoWeights, check_weights, read_headers

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path, "llama")


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Rewrites the weights after a change of the tensors."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def split(folder: Path) -> dict[str, str]:
    """Moves the weights into two shards with an index; returns its map."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    file_of = {name: f"model-0000{1 + (index > 4)}-of-00002.safetensors" for index, name in enumerate(names)}
    for file in set(file_of.values()):
        save_file({name: tensors[name] for name in names if file_of[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": file_of}))
    return file_of


def set_config(folder: Path, **values: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_sound_weights_have_no_findings(family: str, tied: bool, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, family, tie_word_embeddings=tied)
    assert check_weights(folder) == check_weights(folder, value_head=True) == []
    split(folder)
    assert check_weights(folder) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n", "is a git-lfs pointer"),
        (b"", "its 0 bytes are not a whole safetensors file"),
        (b"\xff" * 100, "its 100 bytes are not a whole safetensors file"),
        (None, "are not a whole safetensors file"),
    ],
    ids=["pointer", "empty", "other", "cut"],
)
def test_a_file_that_is_no_safetensors_file_is_named(folder: Path, content: bytes | None, message: str) -> None:
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:-1] if content is None else content)
    with pytest.raises(UnsupportedModel) as error:
        check_weights(folder)
    assert str(error.value).startswith(f"{file}: ") and message in str(error.value)


def test_weights_in_other_formats_or_without_an_index_are_refused(folder: Path) -> None:
    split(folder)
    (folder / INDEX).unlink()
    with pytest.raises(UnsupportedModel, match=rf"{INDEX}: is missing, and the weights are in 2 shards"):
        check_weights(folder)
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    with pytest.raises(NoWeights, match=f"has no weights; put {WEIGHTS}"):
        check_weights(folder)
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(UnsupportedModel, match=r"pytorch_model\.bin: only safetensors are read"):
        check_weights(folder)


def test_a_lora_adapter_is_named(folder: Path) -> None:
    (folder / "adapter_config.json").touch()
    (folder / "adapter_model.safetensors").touch()
    [warning] = check_weights(folder)
    assert "adapter_config.json: is a LoRA adapter, which the run does not read; merge it" in warning
    (folder / WEIGHTS).unlink()
    with pytest.raises(UnsupportedModel, match="is a LoRA adapter; merge it into its model"):
        check_weights(folder)


def test_a_link_without_a_file_and_a_folder_instead_of_one_are_named(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to("/nowhere/blob")
    with pytest.raises(UnsupportedModel, match=rf"{WEIGHTS}: cannot be read: its target /nowhere/blob is missing"):
        check_weights(folder)
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()
    with pytest.raises(UnsupportedModel, match=rf"{WEIGHTS}: cannot be read: Is a directory"):
        check_weights(folder)


def test_an_index_names_files_that_are_there_and_tensors_that_they_hold(folder: Path) -> None:
    file_of = split(folder)
    first, last = sorted(file_of)[0], sorted(file_of)[-1]

    def refusal(index: object) -> str:
        (folder / INDEX).write_text(index if isinstance(index, str) else json.dumps({"weight_map": index}))
        with pytest.raises(UnsupportedModel) as error:
            check_weights(folder)
        return str(error.value)

    assert f"has no tensor {first}, though {INDEX} names it" in refusal(file_of | {first: file_of[last]})
    assert "model-00003.safetensors: cannot be read: No such file" in refusal(
        file_of | {first: "model-00003.safetensors"}
    )
    assert f"{INDEX}: names /etc/passwd; name files of this folder" in refusal(file_of | {first: "/etc/passwd"})
    assert f"{INDEX}: has no weight_map" in refusal("no JSON")
    assert f"{INDEX}: has no weight_map" in refusal("[]")
    assert f"{INDEX}: is a git-lfs pointer" in refusal("version https://git-lfs.github.com/spec/v1\n")


def test_generation_options_may_be_a_git_lfs_pointer(folder: Path) -> None:
    (folder / "generation_config.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UnsupportedModel, match=r"generation_config\.json: is a git-lfs pointer"):
        check_weights(folder)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocab_size": 105}, r"embed_tokens\.weight and config\.json disagree: shapes \[101, 64\] and \[105, 64\]"),
        ({"head_dim": 16}, r"layers\.0\.self_attn\.q_proj\.weight and config\.json .* \[96, 64\] and \[64, 64\]"),
        ({"num_hidden_layers": 3}, r"9 tensors \(such as model\.layers\.3\..*\) cannot be used by a LlamaForCausalLM"),
        ({"num_hidden_layers": 5}, r"a LlamaForCausalLM needs 9 tensors \(such as model\.layers\.4\."),
        ({"architectures": ["Qwen2ForCausalLM"]}, r"a Qwen2ForCausalLM needs 12 tensors"),
        ({"pad_token_id": 101}, r"config\.json: pad_token_id is 101, but vocab_size is 101"),
        ({"eos_token_id": [5, 200]}, r"config\.json: eos_token_id is 200, but vocab_size is 101"),
    ],
)
def test_what_disagrees_with_the_configuration_is_an_error(
    folder: Path, values: dict[str, object], message: str
) -> None:
    set_config(folder, **values)
    with pytest.raises(UnsupportedModel, match=message):
        check_weights(folder)


def test_rows_of_the_embedding_are_compared_with_the_vocabulary(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"model.embed_tokens.weight": torch.zeros(104, 64)}))
    with pytest.raises(UnsupportedModel, match=r"embed_tokens\.weight and config\.json disagree: shapes \[104, 64\]"):
        check_weights(folder)


def test_tensors_that_would_not_be_read_are_named(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}))
    assert check_weights(folder) == []
    edit(folder, lambda tensors: tensors.update({"mtp.weight": torch.zeros(2)}))
    assert check_weights(folder) == [f"{folder}: the run does not read 1 tensor (such as mtp.weight)"]
    edit(folder, lambda tensors: tensors.update({f"{Q_PROJ}.bias": torch.zeros(96)}))
    with pytest.raises(
        UnsupportedModel, match=rf"1 tensor \(such as {Q_PROJ}\.bias\) cannot be used by a LlamaForCausalLM"
    ):
        check_weights(folder)


def test_the_head_of_a_model_with_tied_weights_is_not_read(folder: Path) -> None:
    set_config(folder, tie_word_embeddings=True)
    [warning] = check_weights(folder)
    assert "(such as lm_head.weight) (tie_word_embeddings is true" in warning


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_weights_are_floats(folder: Path, dtype: torch.dtype) -> None:
    edit(folder, lambda tensors: tensors.update({f"{Q_PROJ}.weight": torch.zeros(96, 64).to(dtype)}))
    with pytest.raises(UnsupportedModel, match=rf"{Q_PROJ}\.weight has dtype \w+; use weights in F64"):
        check_weights(folder)


def test_a_reward_model_needs_its_score(folder: Path) -> None:
    set_config(folder, architectures=["LlamaForSequenceClassification"], num_labels=1)
    with pytest.raises(UnsupportedModel, match=r"needs 1 tensor \(such as score\.weight\)"):
        check_weights(folder, value_head=True)
    edit(folder, lambda tensors: tensors.update({"score.weight": torch.zeros(1, 64)}))
    assert check_weights(folder, value_head=True) == []


def test_headers_of_models_that_cannot_be_trained_are_read(folder: Path) -> None:
    set_config(folder, architectures=["GemmaForCausalLM"])
    assert read_headers(folder)[f"{Q_PROJ}.weight"].shape == (96, 64)
