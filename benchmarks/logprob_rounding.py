"""How far apart transformers and the trainer compute the same log-probs, by depth, width, length and precision.

    python -m benchmarks.logprob_rounding --json FILE

Models have random weights of two scales: the usual 0.02, and 0.2, whose logits are large. The tokens are sampled by
transformers after random ones. A check fails where the bound of `roll.configs.learning.rounding` is less than three
times the mean; in bf16 that is asked of the usual scale alone.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common import Check, Measurement, at_most, main
from roll.configs.devices.parallel_layout import ParallelLayout
from roll.configs.learning.rounding import mismatch_bounds

CASES = [(layers, width, 64) for layers in (2, 10, 40) for width in (64, 256)] + [(10, 256, 32), (10, 256, 1024)]
"""Layers, width and tokens."""

SCALES = (0.02, 0.2)
SAMPLES, SAMPLED = 4, 16
ROOM = 3.0


def compare(folder: Path, cases: list[tuple[Any, ...]]) -> list[float]:
    """Mean absolute difference of the log-probs of each case."""
    from roll.platforms import get_platform

    get_platform("cpu").prepare_megatron()
    return [_difference(Path(tempfile.mkdtemp(dir=folder)), *case) for case in cases]


def _difference(folder: Path, dtype: str, scale: float, layers: int, width: int, tokens: int) -> float:
    import torch
    from transformers import AutoModelForCausalLM

    from roll.configs.arguments import TrainModelArguments
    from roll.configs.pipeline import SFTConfig
    from roll.configs.roles import ActorTrainConfig
    from roll.datasets.batch import Batch
    from roll.distributed.process_groups import hold_port
    from roll.distributed.train.megatron_infer import MegatronInferStrategy
    from roll.models.tiny import write_tiny_model
    from roll.platforms import get_platform

    sizes: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_attention_heads": width // 32,
        "head_dim": 32,
    }
    sizes |= {"num_hidden_layers": layers, "max_position_embeddings": 4096, "num_key_value_heads": width // 64}
    write_tiny_model(folder, "llama", initializer_range=scale, vocab_size=2048, tie_word_embeddings=True, **sizes)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    )
    torch.manual_seed(1)
    ids = torch.randint(0, 2048, (SAMPLES, tokens - SAMPLED))
    ids = model.generate(
        ids, do_sample=True, top_k=0, min_new_tokens=SAMPLED, max_new_tokens=SAMPLED, eos_token_id=None
    )
    with torch.no_grad():
        log_probs = model(ids).logits[:, -SAMPLED - 1 : -1].float().log_softmax(-1)
    expected = log_probs.gather(-1, ids[:, -SAMPLED:, None])[..., 0]
    role = ActorTrainConfig(
        model_args=TrainModelArguments(model_name_or_path=str(folder), dtype=dtype),  # type: ignore[arg-type]
        device_mapping=[0],
    )
    strategy = MegatronInferStrategy(role, SFTConfig(response_length=4096), ParallelLayout(), 0, get_platform("cpu"))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(hold_port())}
    strategy.initialize()
    positions = torch.arange(tokens).expand_as(ids).contiguous()
    data = Batch({"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": positions})
    data.meta_info = {"temperature": 1.0, "micro_batches": [list(range(SAMPLES))]}
    found = strategy.compute_log_probs(data).batch["log_probs"][:, -SAMPLED:]
    strategy.shutdown()
    return float((found - expected).abs().mean())


def measure() -> Measurement:
    """One process for all cases."""
    cases = [(dtype, scale, *case) for dtype in ("fp32", "bf16") for scale in SCALES for case in CASES]
    with tempfile.TemporaryDirectory() as folder:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            found = process.submit(compare, Path(folder), cases).result()
    checks: list[Check] = []
    raw = {}
    for (dtype, scale, layers, width, tokens), mean in zip(cases, found, strict=True):
        name = f"{dtype}, {layers} layers of width {width}, {tokens} tokens, scale {scale}"
        bound = mismatch_bounds((dtype,), layers, width, tokens)["mean_logprob_mismatch"] or 0.0
        raw[name] = {"mean": mean, "bound": bound}
        if dtype == "fp32" or scale == SCALES[0]:
            checks.append(at_most(f"{name}: mean difference", mean, bound / ROOM))
    return raw, checks


if __name__ == "__main__":
    main(measure, __doc__ or "")
