"""`roll compare --gradient`: the trainer's gradient norm of a dumped batch is that of transformers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from roll.models.tiny import write_tiny_model
from tests.configs.samples import RLVR, write
from tests.tools.compare.dump_writers import LENGTHS, ids_of, slime_train

pytestmark = pytest.mark.integration

ADVANTAGES = [1.0, -0.5, 0.25, -0.75, 1.5, -0.5, -0.5, -0.5]


def test_the_norm_of_the_weights_gradient_is_that_of_transformers(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "qwen2")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    log_probs, loss = [], torch.zeros(())
    for number, (advantage, length) in enumerate(zip(ADVANTAGES, LENGTHS, strict=True)):
        ids = torch.tensor([ids_of(number)])
        scores = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[-length:, 0]
        log_probs.append(scores.detach())
        loss = loss - advantage * (scores - scores.detach()).exp().sum() / sum(LENGTHS)
    loss.backward()
    norm = float(torch.stack([each.grad.norm() for each in model.parameters() if each.grad is not None]).norm())
    dump = slime_train(tmp_path, ADVANTAGES, log_probs)
    keys = (
        "rollout_batch_size=128",
        "num_return_sequences_in_group=4",
        "loss_agg_mode=token-mean",
        "prompt_length=24",
        "response_length=8",
    )
    words = ("compare", str(write(tmp_path, RLVR)), f"pretrain={folder}", *keys, "--with", str(dump), "--gradient")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-m", "roll", *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = re.search(r"gradient norm of the weights of pretrain: (\S+), at loss (\S+)", done.stdout)
    apart = re.search(r"its log-probs to old_log_probs of the dump: (\S+)", done.stdout)
    assert found is not None and apart is not None, done.stdout
    assert float(found[1]) == pytest.approx(norm, rel=1e-4)
    assert float(found[2]) == pytest.approx(float(loss.detach()), rel=1e-4)
    assert float(apart[1]) < 1e-5
