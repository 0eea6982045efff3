"""Keys and checks of device mappings, parallel layouts, Megatron, SGLang and the environment of processes."""
