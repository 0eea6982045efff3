"""Names a configuration may choose from, importable without torch; `roll.algorithms` and `roll.models` agree with them."""

from __future__ import annotations

ADV_ESTIMATORS = ("grpo", "reinforce")
"""Values of `adv_estimator`."""

PG_VARIANTS = ("ppo", "vanilla")
"""Values of `pg_variant`."""

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Values of `architectures` in a model's config.json that can be trained."""

TEMPLATES = ("native", "none")
"""Values of `data_args.template`."""
