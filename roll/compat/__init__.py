"""Keys and values of other systems (ROLL, verl, slime, TRL, vLLM), read as those of this project.

Only `roll.loading` imports it: `translate.respell` reads the names of each file and of the overrides, so
that an override wins in any spelling, and `translate.translate` reads the merged tree once. A system is a table in the
language of `rules`; what depends on other keys is a function that takes keys of a `Recipe`, puts ours, and leaves a
remark. It may import `roll.configs`.
"""
