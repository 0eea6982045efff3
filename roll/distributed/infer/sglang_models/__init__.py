"""Models that SGLang runs besides its own: each module here has the list EntryClass, in which SGLang looks for them.

SGLang imports this package where SGLANG_EXTERNAL_MODEL_PACKAGE names it (`VALUE_MODELS` in `sglang_engine`).
"""
