"""Qwen2 in plain torch, independent of Megatron, SGLang and transformers: random models and their fp32 reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from roll.configs.arguments import TORCH_DTYPES
from roll.datasets.batch import Batch
from roll.hub.names import CONFIG_NAME, WEIGHT_FILE

LEARNING_RATE = 1e-4
"""Of the optimizer steps that are compared, where a check has no rate of its own."""

LOGIT_STD = 6.0
"""Standard deviation of a random model's logits: like those of a trained model they reach 25."""

ROPE_THETA = 10_000.0


class Qwen2(nn.Module):
    """Logits [B, T, vocabulary] of right-padded token ids [B, T]; the parameters have their HF names."""

    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__()
        hidden, vocabulary = shape["hidden_size"], shape["vocab_size"]
        layers = nn.ModuleList(_Layer(shape) for _ in range(shape["num_hidden_layers"]))
        table = nn.Embedding(vocabulary, hidden)
        self.model = nn.ModuleDict({"embed_tokens": table, "layers": layers, "norm": nn.RMSNorm(hidden, 1e-6)})
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)
        self.head_dim = shape["head_dim"]

    def forward(self, ids: Tensor) -> Tensor:
        halves = torch.arange(0, self.head_dim, 2) / self.head_dim
        angles = torch.arange(ids.shape[1])[:, None] * ROPE_THETA**-halves
        rotation = (angles.cos().repeat(1, 2), angles.sin().repeat(1, 2))
        x = self.model["embed_tokens"](ids)
        for layer in cast(nn.ModuleList, self.model["layers"]):
            x = layer(x, rotation)
        return self.lm_head(self.model["norm"](x))


class _Layer(nn.Module):
    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__()
        hidden, width, self.head_dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
        query, key = (shape[name] * self.head_dim for name in ("num_attention_heads", "num_key_value_heads"))
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(hidden, 1e-6), nn.RMSNorm(hidden, 1e-6)
        sizes = {"q_proj": query, "k_proj": key, "v_proj": key}
        projections = {name: nn.Linear(hidden, size) for name, size in sizes.items()}
        self.self_attn = nn.ModuleDict({**projections, "o_proj": nn.Linear(query, hidden, bias=False)})
        gate_and_up = {name: nn.Linear(hidden, width, bias=False) for name in ("gate_proj", "up_proj")}
        self.mlp = nn.ModuleDict({**gate_and_up, "down_proj": nn.Linear(width, hidden, bias=False)})

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        attention, mlp, normed = self.self_attn, self.mlp, self.input_layernorm(x)
        q, k, v = (self._heads(attention[name](normed)) for name in ("q_proj", "k_proj", "v_proj"))
        q, k = _rotated(q, *rotation), _rotated(k, *rotation)
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attention["o_proj"](mixed.transpose(1, 2).flatten(2))
        normed = self.post_attention_layernorm(x)
        return x + mlp["down_proj"](F.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


@torch.no_grad()
def write_random_model(folder: Path, shape: dict[str, Any], dtype: str) -> Path:
    """Writes a HF folder without tokenizer; norms and biases are random too, so that mix-ups show.

    Args:
        folder: created if missing.
        shape: sizes under their names in config.json.
        dtype: fp32 or bf16.
    """
    name = TORCH_DTYPES[dtype]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2(shape)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
        model.lm_head.weight.normal_(std=LOGIT_STD / shape["hidden_size"] ** 0.5)
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "dtype": name,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "tie_word_embeddings": False,
        **shape,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2))
    weights = {key: value.to(getattr(torch, name)) for key, value in model.state_dict().items()}
    save_file(weights, folder / WEIGHT_FILE, metadata={"format": "pt"})
    return folder


class Reference:
    """The model of a HF folder on the CPU, computed in fp32 and trained with torch's AdamW.

    The optimizer has fp32 weights, and after a step the model has these rounded to the folder's dtype, as in training
    in half precision: a step smaller than the spacing of bf16 changes few weights, and which ones is no rounding noise.
    """

    def __init__(self, folder: Path, learning_rate: float = LEARNING_RATE) -> None:
        config = json.loads((folder / CONFIG_NAME).read_text())
        self._dtype: torch.dtype = getattr(torch, config["dtype"])
        with torch.device("meta"):
            self._model = Qwen2(config)
        weights = {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}
        self._model.load_state_dict({key: value.float() for key, value in weights.items()}, assign=True)
        self._weights = [nn.Parameter(parameter.detach().clone()) for parameter in self._model.parameters()]
        self._optimizer = torch.optim.AdamW(self._weights, lr=learning_rate, weight_decay=0.0)

    def log_probs(self, data: Batch, temperature: float) -> Tensor:
        """Log-probs [B, T]; index t is the log-prob of token t, 0 at t = 0."""
        ids = data.batch["input_ids"]
        logits = self._model(ids)[:, :-1] / temperature
        chosen = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])
        return F.pad(chosen[..., 0], (1, 0))

    def train_step(self, data: Batch) -> float:
        """One optimizer step on the responses of `data`; returns the loss before it."""
        mask = data.batch["response_mask"]
        loss = -(self.log_probs(data, 1.0) * mask).sum() / mask.sum()
        self._model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        pairs = list(zip(self._weights, self._model.parameters(), strict=True))
        for weight, parameter in pairs:
            weight.grad = parameter.grad
        self._optimizer.step()
        with torch.no_grad():
            for weight, parameter in pairs:
                parameter.copy_(weight.to(self._dtype))
        return loss.item()


def largest_relative_difference(losses: list[float], expected: list[float]) -> float:
    return max(abs(loss - right) / abs(right) for loss, right in zip(losses, expected, strict=True))
