"""Computes the values for the columns of a spec from a model's outputs, on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from nimble_jobs.errors import ModelError
from nimble_jobs.models.build import DTYPES
from nimble_jobs.models.classes import Classes, classes_of
from nimble_jobs.models.scores import scores_among
from nimble_jobs.spec import JobSpec
from nimble_jobs.spec.pooling_rules import leaves_out_head

_FROM_LOGITS = {"top1", "top5", "probability", "logits"}
_FROM_CLASSES = {"top1_label", "probabilities", "score"}  # unless the model itself returns an output of that name
_FROM_TOKENS = {"token_labels", "token_probabilities"}  # unless, as above
_OF_TEXTS = {"token_count", "tokens", "offsets"}  # made on the host, unless, as above
RANKS = ("top1", "top1_label", "top5", "token_labels")  # numbers of classes, which hide that scores are not finite
_SHOWN = frozenset({"probability", "probabilities", "token_probabilities"})  # which do not
_SIGMOIDS = frozenset({"probability", "probabilities"})  # of a multi-label model: that of infinity is 1
LARGEST = "the largest score"  # beside the fields: float32 [n] or [n, tokens]
_NOT_OUTPUTS = {"id", "label"}
KNOWN = frozenset(_FROM_LOGITS | _FROM_CLASSES | _FROM_TOKENS | _OF_TEXTS | _NOT_OUTPUTS | {"embedding"})
_TOP = 5
_USUAL_CLASSES = 1000


@dataclass(frozen=True)
class Heads:
    """The values for `output.fields`, by field, and `LARGEST` if they only rank scores that no field shows.

    top1 and top1_label: int64 [n]; top5: int64 [n, 5]; probability and score: float32 [n]; probabilities: float32
    [n, classes]; token_labels int64 and token_probabilities float32: [n, tokens]. Logits and other outputs stay as the
    model returns them. Of classes with equal scores, the first one
    counts.
    """

    fields: tuple[str, ...]
    classes: Classes | None = None  # what the model's configuration says of them
    headless: bool = False  # the model's own head was left out

    @classmethod
    def of(cls, fields: Sequence[str], classes: Classes | None = None, *, headless: bool = False) -> Heads:
        """The heads for the fields that depend on outputs."""
        return cls(tuple(field for field in fields if field not in _NOT_OUTPUTS), classes, headless)

    def __call__(self, outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The values by field. Raises ModelError for a field that the model does not return as plain numbers."""
        made: dict[str, torch.Tensor] = {}
        tokens: torch.Tensor | None = None  # the scores of tokens
        asked = (_FROM_LOGITS | _FROM_CLASSES - set(outputs)) & set(self.fields)
        if _of_tokens(outputs):
            asked.discard("logits")
        ranked = logits_of(outputs) if asked else None
        logits = None if ranked is None else _plain("logits", ranked)
        scores = None if logits is None else logits.float()
        for field in self.fields:
            if field in asked:
                assert logits is not None
                assert scores is not None
                made[field] = logits if field == "logits" else self._of_scores(field, scores)
            elif field in outputs:
                made[field] = _plain(field, outputs[field])
            elif field in _FROM_TOKENS:
                tokens = _token_scores(field, outputs) if tokens is None else tokens
                made[field] = self._of_tokens(field, tokens)
            elif field in _OF_TEXTS:
                continue
            else:
                why = ", because its head is left out to pool tokens into embedding" if self.headless else ""
                raise ModelError(f"output.fields: the model returns no {field!r}{why}; it returns {', '.join(outputs)}")
        if tokens is not None and scores is None:
            ranked, scores = outputs["logits"], tokens
        hidden = any(field in made and (field in asked or field not in outputs) for field in RANKS)
        shown = _SHOWN - _SIGMOIDS if self._multi_label else _SHOWN
        if hidden and shown.isdisjoint(made) and not any(value is ranked for value in made.values()):
            assert scores is not None
            made[LARGEST] = scores.amax(dim=-1)
        return made

    def _of_scores(self, field: str, scores: torch.Tensor) -> torch.Tensor:
        count, classes = scores.shape[1], self.classes
        if field == "score":
            if count != 1:
                raise ModelError(f"output.fields: score needs a model of one class; this one has {count}")
            return scores[:, 0]
        if classes is not None and count == 1:
            raise ModelError(
                f"output.fields: {field} needs several classes; this model has one, so its result is score"
            )
        match field:
            case "top1_label":
                if classes is None:
                    raise ModelError(
                        "output.fields: top1_label needs names of classes; only config.json has them, or classes.json "
                        "beside model.weights"
                    )
                if classes.unnamed is not None:
                    raise ModelError(f"output.fields: top1_label: {classes.unnamed}")
                if len(classes.names) != count:
                    raise ModelError(
                        f"output.fields: top1_label: {classes.file} names {len(classes.names)} classes; "
                        f"the model returns {count}"
                    )
                return scores.argmax(dim=1)
            case "top1":
                return scores.argmax(dim=1)
            case "top5":
                return scores.sort(dim=1, descending=True, stable=True).indices[:, :_TOP].contiguous()
            case "probabilities":
                return scores.sigmoid() if self._multi_label else scores.softmax(dim=1)
            case _:
                largest = scores.amax(dim=1, keepdim=True)
                if self._multi_label:
                    return largest[:, 0].sigmoid()
                # Of the largest: 1 over the sum of what each is of it.
                return 1.0 / (scores - largest).exp().sum(dim=1)

    def _of_tokens(self, field: str, scores: torch.Tensor) -> torch.Tensor:
        if field == "token_probabilities":
            return 1.0 / (scores - scores.amax(dim=2, keepdim=True)).exp().sum(dim=2)
        if self.classes is not None and self.classes.unnamed is not None:
            raise ModelError(f"output.fields: {field}: {self.classes.unnamed}")
        if self.classes is None or len(self.classes.names) != scores.shape[2]:
            known = "" if self.classes is None else f" {self.classes.file} names {len(self.classes.names)} classes;"
            raise ModelError(f"output.fields: {field} needs names of classes;{known} the model has {scores.shape[2]}")
        return scores.argmax(dim=2)

    @property
    def _multi_label(self) -> bool:
        return self.classes is not None and self.classes.multi_label


def heads_of(spec: JobSpec) -> Heads:
    """The heads that a job asks for. Raises ModelError for a malformed config.json."""
    fields = spec.output.fields
    needs_classes = (_FROM_LOGITS | _FROM_CLASSES | _FROM_TOKENS) & set(fields)
    classes = classes_of(spec.model) if needs_classes else None
    return Heads.of(fields, classes, headless=leaves_out_head(spec))


def load_kernels(spec: JobSpec, device: torch.device) -> None:
    """Launch what a job will compute from class scores, over zeros, and wait for nothing.

    A process's first call of an operator loads its kernels onto the GPU. That takes milliseconds for each, in which
    the job's replays would not have begun.
    """
    fields = tuple(field for field in spec.output.fields if field in _FROM_LOGITS)
    scores = torch.zeros(spec.input.batch_size, _USUAL_CLASSES, dtype=DTYPES[spec.model.dtype], device=device)
    with torch.no_grad():
        Heads(fields)({"logits": scores})


def _of_tokens(outputs: Mapping[str, torch.Tensor]) -> bool:
    """Whether the logits are those of tokens, [batch, tokens, classes]."""
    return "logits" in outputs and outputs["logits"].dim() == 3


def _token_scores(field: str, outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The scores of tokens, float32 [batch, tokens, classes], for a field. Raises ModelError if there are none."""
    if not _of_tokens(outputs):
        raise ModelError(
            f"output.fields: {field} needs logits of shape [batch, tokens, classes]; "
            f"the model returns {_shapes(outputs)}"
        )
    return _plain("logits", outputs["logits"]).float()


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The output. Raises ModelError unless it is a tensor of real numbers, with some for each record."""
    if tensor.is_nested:
        kind = "a nested tensor"
    elif tensor.layout is not torch.strided:
        kind = f"a sparse tensor of shape {list(tensor.shape)}"
    elif tensor.is_complex():
        kind = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    elif 0 in tensor.shape[1:]:
        raise ModelError(
            f"output.fields: {name!r} has shape {list(tensor.shape)}; expected at least one value for each record"
        )
    else:
        return tensor
    raise ModelError(
        f"output.fields: {name!r} is {kind}; expected a plain tensor of real numbers, a row for each record"
    )


def logits_of(
    outputs: Mapping[str, torch.Tensor],
    needs: str = "output.fields: top1, top5, probability and logits need",
    instead: str = "; or name an output itself in output.fields",
) -> torch.Tensor:
    """The class scores, shape (batch, classes): `logits`, `output`, or the only output that can be meant.

    Raises ModelError if there are none or several. It says what `needs` them, and what to do `instead`.
    """
    meant = scores_among(outputs)
    if len(meant) == 1:
        return next(iter(meant.values()))
    if meant:
        raise ModelError(
            f"{needs} scores of shape [batch, classes], and any of {_shapes(meant)} may be meant; "
            f"expected one output of this shape, or one named 'logits'{instead}"
        )
    raise ModelError(f"{needs} scores of shape [batch, classes]; the model returns {_shapes(outputs)}")


def _shapes(outputs: Mapping[str, torch.Tensor]) -> str:
    return ", ".join(f"{name} {'nested' if t.is_nested else list(t.shape)}" for name, t in outputs.items())
