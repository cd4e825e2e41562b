"""One run of the benchmark: provides texts, models and defaults, then measures one model after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from nimble_jobs.bench.scoring.workshop import Workshop
from nimble_jobs.bench.text import corpus, driver
from nimble_jobs.bench.text.request import TextWanted
from nimble_jobs.bench.text.results import TextResults, TextRow

METHOD = {
    "texts_per_s": "texts over the seconds of the whole process, from its start to its end: imports, loading, "
    "compilation, tokenising, writing; median of the rounds. Compilers' caches on disk are warm after the search",
    "start_s": "from the start of the process until the first batch of embeddings. Ours: the process without the run",
    "after_start_texts_per_s": "texts over wall_s - start_s",
    "tokens_per_s": "tokens without padding, texts cut at max_length, over wall_s",
    "padding_share": "share of padding in the tokens that the model computes",
    "host_peak_bytes": "proportional set size of the process and all that it started, sampled 4 times a second",
    "peak_bytes": "memory of the first device beyond what was in use before, sampled alike; null without nvidia-smi",
    "relative_norm": "largest over all texts: norm of the difference from the reference's embedding over its norm; "
    "the reference is eager-sorted, where that was measured",
    "prepare_s": "ours, stored: the whole process of `cache build`, once; the runs lack what it did not build in "
    "the time limit",
}


def measure(wanted: TextWanted, shop: Workshop, kept: Callable[[TextResults], None] = lambda _: None) -> TextResults:
    """Raises UsageError for a model or a device that cannot be had, ProcessDied where torch cannot be loaded.

    `kept` gets the results after every run.
    """
    texts = corpus.provide(shop.folder.parent / "texts", wanted.recipe, shop.told)
    asked = {"device": wanted.device, "models": list(wanted.models), "texts": str(texts)}
    told = shop.step("prepare", asked | {"beside": str(shop.folder.parent), "max_length": wanted.max_length})
    results = TextResults(environment={**told["environment"], "method": METHOD})
    results.environment["texts"] = {**corpus.facts(texts, wanted.recipe), "tokens": told["tokens"]}
    for model in wanted.models:
        place = driver.Place(
            wanted=wanted,
            model=model,
            folder=Path(told["folders"][model]),
            texts=texts,
            count=wanted.recipe.count,
            tokens=told["tokens"][model],
            dtype=wanted.dtype or ("fp16" if told["device"] == "cuda" else "fp32"),
            device=told["device"],
        )
        earlier = list(results.rows)

        def keep(rows: list[TextRow], earlier: list[TextRow] = earlier) -> None:
            results.rows = [*earlier, *rows]
            kept(results)

        own = replace(shop, folder=shop.folder / Path(model).name, home=shop.home / Path(model).name)
        for folder in (own.folder, own.home):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        results.rows = [*earlier, *driver.run(place, own, keep)]
    return results
