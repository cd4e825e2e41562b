"""sentence-transformers' `encode`, which sorts by length itself."""

from sentence_transformers import SentenceTransformer

from nimble_jobs.bench.text.loops.task import Task


def embed(task: Task) -> None:
    table = task.read()
    model = SentenceTransformer(task.model, device=task.device, model_kwargs={"dtype": task.dtype})
    model.max_seq_length = task.max_length
    model.register_forward_hook(lambda _, given, __: task.note(given[0]["input_ids"].shape))
    texts = table["text"].to_pylist()
    found = model.encode(texts, batch_size=task.batch_size, normalize_embeddings=True, show_progress_bar=False)
    task.write(table["id"], found.astype("float32"))
