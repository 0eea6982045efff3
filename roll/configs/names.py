"""Names a configuration may choose from, importable without torch; the registries that hold them agree with these."""

from __future__ import annotations

ADV_ESTIMATORS = ("grpo", "reinforce")
"""Values of `adv_estimator`."""

PG_VARIANTS = ("ppo", "vanilla")
"""Values of `pg_variant`."""

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Values of `architectures` in a model's config.json that can be trained."""

TEMPLATES = ("native", "none", "chatml", "qwen2_5", "qwen3", "llama3")
"""Values of `data_args.template`; `roll.datasets.templates` holds them."""
