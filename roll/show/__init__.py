"""`roll show`: the samples of a step, for people.

`source` finds what a run has written, `samples` makes groups of its lines, `plain_text` makes texts of others harmless,
`episodes` and `layout` turn both into what rich prints, `command` puts it on the screen or a page. Uses `configs`,
`trackers` and `pipeline`.
"""
