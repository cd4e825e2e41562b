"""Where a program's tasks come from: which kernels, over which variant of the module's weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from nimble_jobs.engine import measure
from nimble_jobs.engine.inductor import compile_module, refusing_compilers
from nimble_jobs.engine.record import Recording, record, record_compiled, state_of
from nimble_jobs.errors import CannotRecord
from nimble_jobs.graph.pause import collector_paused
from nimble_jobs.kernel_switches import NOTHING, Kernel, Without
from nimble_jobs.kernels import (
    attention,
    attention_pass,
    depthwise_activated,
    depthwise_pass,
    patches_pass,
    pointwise,
    pointwise_pass,
    product_gelu,
    product_gelu_pass,
    separable,
    separable_pass,
    split_k,
    squeeze_excite,
    squeeze_excite_pass,
)
from nimble_jobs.kernels.ahead import kernels_ahead, twice
from nimble_jobs.kernels.depthwise import with_own_depthwise
from nimble_jobs.kernels.inductor_pass import inductor_pass
from nimble_jobs.kernels.onednn_pass import attention_in_parts, divides_attention, with_packed_weights
from nimble_jobs.kernels.own_kernels import put_in_place
from nimble_jobs.models.packed import Packed
from nimble_jobs.models.preprocessed import Preprocessed
from nimble_jobs.planner.sources.fold import Pairs, folded
from nimble_jobs.planner.sources.merge import Groups, merge
from nimble_jobs.schedule import COMPILERS, Program

Kernels = Literal["eager", "onednn", "inductor", "epilogues", "crowded", "max-autotune"]
_OURS = ("epilogues", "crowded")  # kernels of Inductor and our own: each task in its fastest way, alone or in a crowd
_MOST_READS = 2  # a value that needs more is stored, not computed anew in each kernel; Inductor's own limit is 4
_CROWD = 4  # copies of a task that are timed side by side
Layout = Literal["given", "channels-last"]
Images = list[tuple[torch.Tensor, torch.Tensor]]  # tensors of four dimensions, with their data as they lay first


@dataclass(frozen=True, kw_only=True)
class Source:
    """One way to turn a module into tasks."""

    kernels: Kernels
    layout: Layout
    folded: Pairs = ()  # convolutions, each with the normalisation that is folded into it
    merged: Groups = ()  # linear layers that read the same, each group over one weight
    without: Without = NOTHING  # kernels of our own that are switched off, if a compiler makes the kernels

    @property
    def name(self) -> str:
        """What its candidates are called."""
        fused = Kernel.FUSED_CONVOLUTION not in self.without
        convolutions = ", fused convolutions" if fused else ", convolutions in their fastest ways"
        ours = f"inductor kernels{convolutions}" if self.layout != "given" else "inductor kernels and ours"
        words = {
            "eager": "eager kernels",
            "onednn": "oneDNN kernels over packed weights",
            "inductor": "inductor kernels",
            "epilogues": ours,
            "crowded": f"{ours}, chosen side by side",
            "max-autotune": "max-autotune kernels",
        }
        last = ", channels-last" if self.layout == "channels-last" else ""
        return (
            words[self.kernels]
            + last
            + (", folded" if self.folded else "")
            + (", merged products" if self.merged else "")
        )

    @property
    def compiled(self) -> bool:
        """Whether a compiler makes its kernels."""
        return self.kernels in COMPILERS

    @property
    def rewrites(self) -> bool:
        """Whether a copy of the module with other weights is recorded in its place."""
        return bool(self.folded or self.merged)


_PASSES = (  # in order: the pass over a compiler's graph, and the module that finds our kernels in an earlier recording
    (Kernel.SQUEEZE_EXCITE, squeeze_excite_pass, squeeze_excite),
    (Kernel.SEPARABLE, separable_pass, separable),
    (Kernel.DEPTHWISE_ACTIVATION, depthwise_pass, depthwise_activated),
    (Kernel.POINTWISE, pointwise_pass, pointwise),
    (Kernel.LINEAR_GELU, product_gelu_pass, product_gelu),
    (Kernel.ATTENTION, attention_pass, attention),
    (Kernel.PATCHES, patches_pass, patches_pass),
)
AS_GIVEN = Source(kernels="eager", layout="given")


class Variants:
    """A module in variants that compute the same: four-dimensional weights laid out in another way, normalisations
    folded, linear layers merged; and back again exactly.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._given = _images(module)
        self._rewritten: tuple[tuple[Pairs, Groups], nn.Module, Images] | None = None  # for what, and its own images

    @property
    def have_layouts(self) -> bool:
        """Whether the module has weights that can be laid out in another way."""
        return bool(self._given)

    def use(self, source: Source = AS_GIVEN) -> nn.Module:
        """The module to record and bind for a source; by default, the module as it was given. Raises EngineError if it
        lacks layers that the source names.
        """
        wanted = (source.folded, source.merged)
        if source.rewrites and (self._rewritten is None or self._rewritten[0] != wanted):
            self._lay_out(self._given, "given")
            twin = folded(self._module, source.folded)
            merge(twin, source.merged)
            shared = {id(t) for t, _ in self._given}
            self._rewritten = (wanted, twin, [(t, data) for t, data in _images(twin) if id(t) not in shared])
        self._lay_out(self._given, source.layout)
        if not source.rewrites or self._rewritten is None:
            self._rewritten = None  # its weights take memory
            return self._module
        _, twin, own = self._rewritten
        self._lay_out(own, source.layout)
        return twin

    def settle(self) -> None:
        """Keep the weights as they lie now, for good."""
        self._given = []
        self._rewritten = None

    @staticmethod
    def _lay_out(tensors: Images, layout: Layout) -> None:
        for tensor, given in tensors:
            channels_last = layout == "channels-last"
            tensor.data = given.contiguous(memory_format=torch.channels_last) if channels_last else given


def _images(module: nn.Module) -> Images:
    """Four-dimensional parameters and buffers, each with its data in the present layout."""
    tensors = (*module.parameters(), *module.buffers())
    return [(t, t.data) for t in tensors if t.dim() == 4 and t.is_floating_point()]


def record_source(
    module: nn.Module,
    source: Source,
    inputs: Mapping[str, torch.Tensor],
    device: torch.device,
    *,
    like: Program | None = None,
) -> Recording:
    """Record a module that is the source's variant. Inputs are laid out as its weights are, unless the module takes
    records as they are stored.

    Our own kernels in `source.without` are left out. With `like`, an earlier recording, kernels are expected in
    Inductor's cache, and nothing is measured. Raises CannotRecord if the module does what no schedule can
    hold.
    """
    layout = "given" if isinstance(module, Preprocessed | Packed) else source.layout
    example = {name: _laid_out(tensor, layout) for name, tensor in inputs.items()}
    state = state_of(module)
    if not source.compiled:
        recording = record(module, example, state, device, module)
        if source.kernels == "onednn":
            if divides_attention(recording.program):
                with attention_in_parts():
                    recording = record(module, example, state, device, module)
            recording = with_packed_weights(recording)
    else:
        crowd = _CROWD if source.kernels == "crowded" else 1
        with refusing_compilers("the model"), collector_paused(), measure.crowded(crowd), kernels_ahead():
            call = compile_module(
                module,
                max_autotune=source.kernels == "max-autotune",
                compiled_before=like is not None,
                rewrite=_rewrite(device, like, source.without) if source.kernels in _OURS else None,
                last=inductor_pass(device, source.without) if source.kernels in _OURS else None,
                most_reads=_MOST_READS if source.kernels in _OURS else None,
            )
            recording = record_compiled(call, example, state, device)
            for ours in (squeeze_excite, separable, depthwise_activated, pointwise, product_gelu, attention, split_k):
                recording = put_in_place(recording, device, ours.launched)
            if Kernel.DEPTHWISE not in source.without:
                recording = with_own_depthwise(recording, device, like=like)
    if any(t.random for t in recording.program.tasks):
        place = next(t.source for t in recording.program.tasks if t.random)
        raise CannotRecord(f"the model draws random numbers at {place}; its replays could not be checked")
    return recording


def _rewrite(device: torch.device, like: Program | None, without: Without) -> Callable[[torch.fx.Graph], object]:
    """Put our operators, but for those in `without`, where they are faster, or where an earlier recording has them."""

    def passes(graph: torch.fx.Graph) -> None:
        for kernel, ours, known in _PASSES:
            if kernel not in without:
                ours.rewrite(graph, device, known.wanted_as_in(like) if like else None)

    def measured(graph: torch.fx.Graph) -> None:
        twice(lambda: passes(graph))
        if Kernel.DEPTHWISE not in without:
            depthwise_pass.begin_plain(graph, device)

    return passes if like else measured


def _laid_out(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    if layout == "channels-last" and tensor.dim() == 4 and tensor.is_floating_point():
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor
