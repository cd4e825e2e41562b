"""Are replays of published image models equal to eager, on inputs of scales that the example did not have?

    python scripts/check_models.py [MODEL ...] --json FILE [--table FILE.md] [--limit SECONDS] [--again refused]

Each model has random weights, is small, and is prepared once, with an input of scale 1, in a process of its own on one
thread of the CPU. Then it is called with new inputs of scale 1, 1e-6 and 1e4; the figure is the relative norm of the
difference to eager. Models that are in FILE already are not run again. With --table the whole of FILE is written down.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import commit

SCALES = (1.0, 1e-6, 1e4)
BATCH = 2
LIMIT_S = 240.0

# Side of the input in pixels, by model: the smallest that the architecture takes without much ado.
TIMM = {
    "resnet18": 64, "resnetv2_18": 64, "legacy_seresnet18": 64, "skresnet18": 64, "resnest14d": 64,
    "res2net50_14w_8s": 64, "ecaresnet26t": 64, "gcresnext26ts": 64, "bat_resnext26ts": 256, "botnet26t_256": 256,
    "densenet121": 64, "dla34": 64, "dpn48b": 64, "ese_vovnet19b_slim": 64, "cs3darknet_focus_s": 64,
    "hrnet_w18_small": 64, "efficientnet_b0": 64, "lcnet_035": 64, "mixnet_s": 64, "ghostnet_050": 64,
    "regnetx_002": 64, "dm_nfnet_f0": 64, "nf_resnet26": 64, "eca_nfnet_l0": 64, "repvgg_a0": 64, "mobileone_s0": 64,
    "convnext_atto": 64, "inception_next_atto": 64, "xception41": 96, "selecsls42": 64, "tresnet_m": 64,
    "vit_tiny_patch16_224": 224, "deit_tiny_distilled_patch16_224": 224,
    "cait_xxs24_224": 224, "coat_lite_tiny": 224, "convit_tiny": 224, "crossvit_tiny_240": 240, "davit_tiny": 64,
    "edgenext_xx_small": 64, "efficientformer_l1": 224, "efficientvit_b0": 64, "efficientvit_m0": 224,
    "eva02_tiny_patch14_224": 224, "fastvit_t8": 64, "focalnet_tiny_srf": 64, "gcvit_xxtiny": 224,
    "gmlp_s16_224": 224, "mixer_s32_224": 224, "resmlp_12_224": 224, "hiera_tiny_224": 224, "levit_128s": 224,
    "coatnet_nano_rw_224": 224, "maxvit_rmlp_pico_rw_256": 256, "mambaout_femto": 64, "poolformer_s12": 64,
    "mobilevit_xxs": 64, "mobilevitv2_050": 64, "mvitv2_tiny": 224, "nest_tiny": 224, "pit_ti_224": 224,
    "pvt_v2_b0": 64, "repvit_m0_9": 64, "sequencer2d_s": 224, "swin_tiny_patch4_window7_224": 224,
    "swinv2_cr_tiny_224": 224, "tiny_vit_5m_224": 224, "twins_svt_small": 224, "vit_relpos_small_patch16_224": 224,
    "volo_d1_224": 224, "xcit_nano_12_p16_224": 224,
}  # fmt: skip
TORCHVISION = {
    "alexnet": 64, "vgg11_bn": 32, "squeezenet1_1": 64, "googlenet": 64, "inception_v3": 80, "mnasnet0_5": 64,
    "mobilenet_v3_small": 64, "shufflenet_v2_x0_5": 64, "regnet_y_400mf": 64, "maxvit_t": 224, "swin_v2_t": 64,
    "vit_b_32": 224, "deeplabv3_mobilenet_v3_large": 64, "lraspp_mobilenet_v3_large": 64, "fcn_resnet50": 64,
    "r3d_18": 32, "s3d": 224, "raft_small": 128,
}  # fmt: skip
MODELS = [f"timm:{n}" for n in TIMM] + [f"torchvision:{n}" for n in TORCHVISION]


def built(name: str) -> tuple[Any, Callable[[float, int], tuple[Any, ...]]]:
    """The module in evaluation mode, and what makes its arguments of a scale and a seed."""
    import torch

    torch.manual_seed(0)
    source, _, model = name.partition(":")
    if source == "timm":
        import timm

        module, side = timm.create_model(model, num_classes=10), TIMM[model]
    else:
        import torchvision

        weightless: dict[str, Any] = {"weights": None}
        if model.startswith(("deeplab", "lraspp", "fcn")):
            weightless["weights_backbone"] = None
        if model in ("googlenet", "inception_v3"):
            weightless["init_weights"] = False
        module, side = torchvision.models.get_model(model, **weightless), TORCHVISION[model]
    for parameter in module.parameters():
        if parameter.dim() > 1 and not parameter.any():  # heads that start at zero would make all outputs equal
            torch.nn.init.normal_(parameter, std=0.02)
    shape: tuple[int, ...] = (BATCH, 3, side, side)
    if model in ("r3d_18", "s3d"):
        shape = (BATCH, 3, 16, side, side)
    images = 2 if model == "raft_small" else 1

    def inputs(scale: float, seed: int) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randn(shape, generator=generator) * scale for _ in range(images))

    return module.eval(), inputs


def check(name: str) -> dict[str, Any]:
    """One model's row, made in this process."""
    import torch

    from nimble_jobs import Nimble
    from nimble_jobs.engine.difference import relative_norm
    from nimble_jobs.engine.record import flatten_outputs
    from nimble_jobs.errors import NimbleError

    torch.set_num_threads(1)
    module, inputs = built(name)
    nimble = Nimble(module)
    start = time.perf_counter()
    row: dict[str, Any] = {"model": name, "input": [list(t.shape) for t in inputs(1.0, 0)]}
    try:
        nimble.prepare(inputs(1.0, 0), fuse="off", streams=1, eager="reference")
    except NimbleError as e:
        return row | {"refused": f"{type(e).__name__}: {e}", "prepare_s": time.perf_counter() - start}
    row |= {"prepare_s": time.perf_counter() - start}
    if nimble.schedule is None:
        return row | {"refused": nimble.fallback}
    row |= {"tasks": len(nimble.schedule.program.tasks), "errors": {}}
    with torch.no_grad():
        for seed, scale in enumerate(SCALES, 1):
            expected = flatten_outputs(module(*inputs(scale, seed)))
            found = flatten_outputs(nimble(*inputs(scale, seed)))
            same = found.keys() == expected.keys()
            row["errors"][f"{scale:g}"] = max(relative_norm(found[n], expected[n]) for n in expected) if same else None
            if not all(bool(torch.isfinite(t).all()) for t in expected.values()):
                row.setdefault("not_finite", []).append(f"{scale:g}")
            elif not any(bool(t.any()) for t in expected.values()):
                row["errors"][f"{scale:g}"] = None  # zeros say nothing
    return row


def _in_child(name: str, results: Any) -> None:
    os.environ.setdefault("NIMBLE_JOBS_TIMING_BUDGET_S", "0.01")  # nothing here is about speed
    try:
        results.put(check(name))
    except BaseException as e:  # noqa: BLE001 - a row says what it was
        results.put({"model": name, "crashed": f"{type(e).__name__}: {e}"})


def checked(name: str, limit_s: float) -> dict[str, Any]:
    """`check` in a process of its own, ended after `limit_s` seconds."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    child = context.Process(target=_in_child, args=(name, results))
    child.start()
    deadline = time.monotonic() + limit_s
    row: dict[str, Any] | None = None
    while row is None and time.monotonic() < deadline and (child.is_alive() or not results.empty()):
        if not results.empty():
            row = results.get()
        time.sleep(0.1)
    if row is None:
        row = {"model": name, "crashed": f"no result within {limit_s:.0f} s"}
        child.kill()
    child.join(10)
    return row


def verdict(row: dict[str, Any]) -> str:
    """What a row says, in a word."""
    if "crashed" in row:
        return "crashed"
    if "refused" in row:
        return "refused"
    errors = list(row["errors"].values())
    return "equal" if all(e is not None and e <= 1e-5 for e in errors) else "different"


def table(rows: list[dict[str, Any]], made_by: str | None) -> str:
    """The committed document."""
    counts = {v: sum(verdict(r) == v for r in rows) for v in ("equal", "different", "refused", "crashed")}
    lines = [
        "# Published models against eager",
        "",
        f"{len(rows)} models of timm and torchvision with random weights, batch {BATCH}, on one thread of a CPU, "
        f"commit {made_by}: {counts['equal']} equal to eager, {counts['different']} different, "
        f"{counts['refused']} refused, {counts['crashed']} without a result. Each is prepared with an input of scale 1 "
        "and called with new inputs of scale 1, 1e-6 and 1e4; the columns are relative norms of the difference, of the "
        "worst output. (NaN) is where eager's outputs are not finite; those of the replay are not in the same places.",
        "`scripts/check_models.py --json FILE --table docs/measurements/models.md` measures and writes this page.",
        "",
        "| model | input | tasks | scale 1 | 1e-6 | 1e4 | prepare, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        shapes = ", ".join("×".join(map(str, s)) for s in row.get("input", []))
        if "errors" in row:
            special = row.get("not_finite", [])  # in eager as well, in the same places
            errors = [
                "none" if e is None else f"{e:.1g}" + (" (NaN)" if s in special else "")
                for s, e in row["errors"].items()
            ]
        else:
            errors = [verdict(row), "", ""]
        cells = [row["model"], shapes, str(row.get("tasks", "")), *errors, f"{row.get('prepare_s', 0):.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    others = [r for r in rows if verdict(r) in ("refused", "crashed")]
    if others:
        lines += ["", "## Not recorded", "", "| model | reason |", "|---|---|"]
        lines += [f"| {r['model']} | {(r.get('refused') or r['crashed']).replace('|', '/')} |" for r in others]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds a model")
    parser.add_argument("--again", choices=("refused", "crashed", "different"), help="run models of this verdict again")
    options = parser.parse_args()
    rows = {r["model"]: r for r in json.loads(options.json.read_text())} if options.json.exists() else {}
    for name in options.models:
        if name in rows and verdict(rows[name]) != options.again:
            continue
        rows[name] = checked(name, options.limit)
        print(name, verdict(rows[name]), {k: v for k, v in rows[name].items() if k != "model"}, flush=True)
        options.json.write_text(json.dumps(list(rows.values()), indent=1) + "\n")
    if options.table:
        options.table.write_text(table([rows[n] for n in MODELS if n in rows], commit()))


if __name__ == "__main__":
    main()
