"""SGLang: the worker of an engine, its generation, its monitor, and the receiving of weights."""
