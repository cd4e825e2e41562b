"""ONNX Runtime and TensorRT, where they are installed. Neither belongs to this package's dependencies."""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from nimble_jobs.bench.cell import Cell
from nimble_jobs.bench.request import CONTIGUOUS
from nimble_jobs.bench.runners import CallRunner, Runner, StaticRunner
from nimble_jobs.engine.encode import dtype as dtype_of
from nimble_jobs.errors import EngineError

_NUMPY_NAME = {torch.float32: "float32", torch.float16: "float16", torch.int64: "int64"}


def onnxruntime(cell: Cell, layout: str) -> Iterator[tuple[str, Runner]]:
    """A session over the exported model, its buffers bound once. Raises EngineError where it is not installed."""
    ort = _installed("onnxruntime")
    for package in ("onnx", "onnxscript"):
        _installed(package)
    cuda = cell.device.type == "cuda"
    provider = "CUDAExecutionProvider" if cuda else "CPUExecutionProvider"
    if provider not in ort.get_available_providers():
        raise EngineError(f"onnxruntime {ort.__version__} is installed without {provider}; it runs on the CPU only")
    if cell.dtype == "bf16":
        raise EngineError("onnxruntime has no bf16 input through numpy's types")
    options = {"cudnn_conv_algo_search": "EXHAUSTIVE", "use_tf32": "1", "enable_cuda_graph": "1"} if cuda else {}
    example = {n: t.clone() for n, t in cell.inputs(CONTIGUOUS)[0].items()}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        file = Path(folder) / "model.onnx"
        torch.onnx.export(cell.module(CONTIGUOUS), tuple(example.values()), str(file), dynamo=True, verbose=False)
        session = ort.InferenceSession(str(file), providers=[(provider, options)])
    if provider not in session.get_providers():
        raise EngineError(f"onnxruntime {ort.__version__} could not load {provider}; it runs on the CPU only")
    yield "onnxruntime", _bound(ort.RunOptions(), session, example, cell)


def _bound(quick: Any, session: Any, example: dict[str, torch.Tensor], cell: Cell) -> Runner:
    with torch.no_grad():
        results = cell.module(CONTIGUOUS)(*example.values())
    shapes = results if isinstance(results, tuple | list) else _values(results)
    outputs = {o.name: torch.empty_like(t) for o, t in zip(session.get_outputs(), shapes, strict=True)}
    binding = session.io_binding()
    kind, index = cell.device.type, cell.device.index or 0
    for port, tensor in zip(session.get_inputs(), example.values(), strict=True):
        binding.bind_input(port.name, kind, index, _NUMPY_NAME[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
    for name, tensor in outputs.items():
        binding.bind_output(name, kind, index, _NUMPY_NAME[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
    if kind == "cuda":  # its own stream is not torch's: wait for the device at both ends of every call

        def run() -> None:
            torch.cuda.current_stream(cell.device).synchronize()
            session.run_with_iobinding(binding, quick)
    else:

        def run() -> None:
            session.run_with_iobinding(binding, quick)

    for _ in range(3):
        run()
    return StaticRunner(run, example, lambda: outputs)


def tensorrt(cell: Cell, layout: str) -> Iterator[tuple[str, Runner]]:
    """Compiled by torch_tensorrt. Raises EngineError where it is not installed."""
    torch_tensorrt = _installed("torch_tensorrt", "torch-tensorrt")
    if cell.device.type != "cuda":
        raise EngineError("needs a CUDA device")
    example = tuple(cell.inputs(CONTIGUOUS)[0].values())
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        exported = torch.export.export(cell.module(CONTIGUOUS), example)
        compiled = torch_tensorrt.dynamo.compile(
            exported,
            arg_inputs=list(example),
            enabled_precisions={dtype_of({"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[cell.dtype])},
            min_block_size=1,
        )
        for _ in range(3):
            compiled(*example)
    yield "tensorrt", CallRunner(compiled, cell.device)


def _installed(module: str, package: str | None = None) -> Any:
    if importlib.util.find_spec(module) is None:
        raise EngineError(f"not installed: {package or module}")
    return importlib.import_module(module)


def _values(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else [v for v in result.values() if v is not None]
