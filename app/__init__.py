"""The demo: a page on which a batch is generated step by step, and D-cut's decisions are seen.

settings.py   what a visitor chose, checked against the page's limits
models.py     the target and its drafters, loaded behind the page
run.py        one batch through the engine, a step at a time
trace.py      what the steps did, as records that can be drawn and saved
curve.py      the tokens a second each budget promised in one step
race.py       the same prompts by several methods
plots.py      traces as SVG: heat map, cost curve, ranking, race
panels.py     traces as HTML: answers, numbers, one step under the lens
page.py       what the visitor sees: components and their places
views.py      what the parts of the page become
handlers.py   what happens when the visitor does something
command.py    `hf-dcut demo`
"""
