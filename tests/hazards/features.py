"""What torch offers beside operators: transforms, scripts, hooks, parametrizations, custom functions and operators."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from tests.hazards.case import Case, Cases, Data, maker

CASES: list[Case] = []
case = Cases("features", CASES)


def x(data: Data) -> torch.Tensor:
    return data.floats(3, 4)


def linear() -> dict[str, Any]:
    return {"l": nn.Linear(4, 4)}


@case(x, linear)
def functional_call(m: Any, x: torch.Tensor) -> torch.Tensor:
    own = {n: p * 2 for n, p in m.l.named_parameters()}
    return torch.func.functional_call(m.l, own, (x,))


@case(x, linear)
def functional_call_of_buffers(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.func.functional_call(m.l, {"weight": x[:1].expand(4, 4), "bias": x[0]}, (x,))


@case(x, linear)
def vmap(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: m.l(row).sum() * row)(x)


@case(x)
def vmap_with_randomness(_: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: row + torch.randn(4), randomness="different")(x)


@case(x)
def a_gradient_in_forward(_: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda t: t.pow(2).sum())(x)


@case(x)
def autograd_in_forward(_: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        return torch.autograd.grad(y.exp2().sum(), y)[0]


@case(x)
def backward_in_forward(_: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        y = x.detach().clone().requires_grad_()
        (y**3).sum().backward()
    return y.grad


@case(x)
def a_jacobian_in_forward(_: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.func.jacrev(torch.sin)(x[0])


@case(x, linear)
def trains_a_step_in_forward(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Test-time training."""
    with torch.enable_grad():
        loss = m.l(x).square().mean()
        grads = torch.autograd.grad(loss, list(m.l.parameters()))
    with torch.no_grad():
        for p, g in zip(m.l.parameters(), grads, strict=True):
            p.sub_(0.01 * g.clamp(-1, 1))
    return m.l(x)


@case(x, linear, recorded=True)
def checkpointed(m: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(m.l, x, use_reentrant=False)


@case(x, linear)
def copies_a_layer_in_forward(m: Any, x: torch.Tensor) -> torch.Tensor:
    other = copy.deepcopy(m.l)
    other.weight.data.mul_(2)
    return other(x)


@case(x)
def copies_its_input_deeply(_: Any, x: torch.Tensor) -> torch.Tensor:
    y = copy.deepcopy(x)
    y.add_(1)
    return x * y


@case(x, linear, recorded=True)
def autocast_in_forward(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        return m.l(x.clamp(-5, 5))


@case(x, linear)
def inference_mode_in_forward(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        y = m.l(x)
    return y.clone()


@case(x, linear)
def inference_tensors_from_forward(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return m.l(x)


@case(x, linear)
def toggles_gradients(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        y = m.l(x)
    with torch.no_grad():
        y = y * 2
    return y.detach()


@case(x, linear)
def returns_what_requires_grad(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return m.l(x)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return g * 2


@case(x, recorded=True)
def a_function_of_its_own(_: Any, x: torch.Tensor) -> torch.Tensor:
    return Doubled.apply(x)


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return g * 2


@case(x, recorded=True)
def a_function_that_writes_its_input(_: Any, x: torch.Tensor) -> torch.Tensor:
    return InPlace.apply(x) + 1


@torch.library.custom_op("nimble_hazards::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("nimble_hazards::add_one_", mutates_args={"x"})
def add_one_(x: torch.Tensor) -> None:
    x.add_(1)


@torch.library.custom_op("nimble_hazards::first", mutates_args=())
def first(x: torch.Tensor) -> torch.Tensor:
    return x.new_full((2,), float(x.flatten()[0]))


@torch.library.custom_op("nimble_hazards::secretly_", mutates_args=())
def secretly_(x: torch.Tensor) -> torch.Tensor:
    x.data.add_(1)
    return x * 2


@torch.library.custom_op("nimble_hazards::count", mutates_args=())
def count(x: torch.Tensor) -> int:
    return int((x > 0).sum())


@case(x, recorded=True)
def a_custom_operator(_: Any, x: torch.Tensor) -> torch.Tensor:
    return twice(x) + 1


@case(x, recorded=True)
def a_custom_operator_that_writes(_: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    add_one_(y)
    add_one_(x)
    return y * 2


@case(x, recorded=True)
def a_custom_operator_that_reads_on_the_host(_: Any, x: torch.Tensor) -> torch.Tensor:
    """What an operator does inside, it does at each replay too."""
    return first(x)


@case(x)
def a_custom_operator_that_returns_a_number(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x * count(x)


@case(x)
def a_custom_operator_that_writes_in_secret(_: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    z = secretly_(y)
    return y + z


@case(x, lambda: {"n": torch.zeros(())})
def a_custom_operator_that_writes_state_in_secret(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x + secretly_(m.n)


@case(x)
@maker
def a_scripted_submodule() -> nn.Module:
    return nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), nn.Tanh())


@case(x)
@maker
def a_traced_submodule() -> nn.Module:
    return nn.Sequential(torch.jit.trace(nn.Linear(4, 4), torch.ones(2, 4)), nn.Tanh())


@case(x)
@maker
def a_scripted_module_that_branches() -> nn.Module:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if bool(x.sum() > 0):
                return x * 2
            return x * 3

    return nn.Sequential(torch.jit.script(Branches()))


@case(x)
@maker
def an_exported_program() -> nn.Module:
    return nn.Sequential(torch.export.export(nn.Linear(4, 4).eval(), (torch.ones(3, 4),)).module())


@case(x)
@maker
def a_traced_graph() -> nn.Module:
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.GELU()))


@case(x, recorded=True)
@maker
def weight_norm() -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(4, 4))


@case(x)
@maker
def spectral_norm() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)))


class Symmetric(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w.triu() + w.triu(1).transpose(-1, -2)


@case(x, recorded=True)
@maker
def a_parametrization() -> nn.Module:
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


@case(x)
@maker
def a_cached_parametrization() -> nn.Module:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(4, 4)
            parametrize.register_parametrization(self.l, "weight", Symmetric())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with parametrize.cached():
                return self.l(self.l(x))

    return Cached()


@case(x, attributes=False)
@maker
def pruned() -> nn.Module:
    from torch.nn.utils import prune

    layer = nn.Linear(4, 4)
    prune.l1_unstructured(layer, "weight", 0.5)
    return nn.Sequential(layer, nn.ReLU())


def hooked(
    kind: str, hook: Any, name: str, *, recorded: bool | None = None, attributes: bool = True, **options: Any
) -> None:
    def make() -> nn.Module:
        net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        getattr(net[0], f"register_{kind}")(hook, **options)
        return net

    make.__name__ = name
    case(x, recorded=recorded, attributes=attributes)(maker(make))


hooked("forward_hook", lambda _m, _a, y: y * 2, "a_hook", recorded=True)
hooked("forward_pre_hook", lambda _m, a: (a[0] + 1,), "a_pre_hook", recorded=True)
hooked("forward_hook", lambda _m, _a, y: y.mul_(2), "a_hook_that_writes")
hooked("forward_hook", lambda _m, _a, y: y * float(y.sum()), "a_hook_that_reads")
hooked("forward_hook", lambda m, _a, y: setattr(m, "seen", y.detach().clone()), "a_hook_that_keeps", attributes=False)
hooked("forward_hook", lambda m, _a, y: setattr(m, "n", getattr(m, "n", 0) + 1), "a_hook_that_counts", attributes=False)
hooked("forward_hook", lambda m, _a, _y: (m.bias.data.add_(1), None)[1], "a_hook_that_moves_the_bias")
hooked("forward_hook", lambda _m, _a, k, y: y * k.get("scale", 2), "a_hook_of_keywords", with_kwargs=True)


@case(x)
@maker
def a_hook_that_lets_itself_be_removed() -> nn.Module:
    layer = nn.Linear(4, 4)

    def once(_m: nn.Module, _a: Any, y: torch.Tensor) -> torch.Tensor:
        handle.remove()
        return y * 2

    handle = layer.register_forward_hook(once)
    return nn.Sequential(layer)


@case(x)
@maker
def a_compiled_submodule() -> nn.Module:
    return nn.Sequential(torch.compile(nn.Linear(4, 4), backend="eager"), nn.ReLU())


@case(x)
def registers_a_hook_in_forward(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.register_forward_hook(lambda _m, _a, y: y + 1)
    return x * 2


@case(x, recorded=True)
@maker
def fused_attention_block() -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(4, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.q(x)[None, None].chunk(3, -1)
            return functional.scaled_dot_product_attention(q, k, v).squeeze()

    return Block()


@case(x)
def a_torch_function_mode(_: Any, x: torch.Tensor) -> torch.Tensor:
    from torch.overrides import TorchFunctionMode

    class Halves(TorchFunctionMode):
        def __torch_function__(self, f: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            y = f(*args, **(kwargs or {}))
            return y * 0.5 if f is torch.sin else y

    with Halves():
        return torch.sin(x)


@case(x)
def a_dispatch_mode(_: Any, x: torch.Tensor) -> torch.Tensor:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counts(TorchDispatchMode):
        n = 0

        def __torch_dispatch__(self, f: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counts.n += 1
            return f(*args, **(kwargs or {}))

    with Counts():
        y = x.sin().cos()
    return y * Counts.n


@case(x)
def the_default_dtype(_: Any, x: torch.Tensor) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        return x * torch.ones(4, device=x.device)
    finally:
        torch.set_default_dtype(torch.float32)


@case(x)
def the_default_device(_: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.device("cpu"):
        return x * torch.ones(4).to(x.device)


@case(x)
def a_thread_in_forward(_: Any, x: torch.Tensor) -> torch.Tensor:
    from threading import Thread

    found: list[torch.Tensor] = []
    thread = Thread(target=lambda: found.append(x * 2))
    thread.start()
    thread.join()
    return found[0] + 1


@case(x)
def a_fork_of_torchscript(_: Any, x: torch.Tensor) -> torch.Tensor:
    future = torch.jit.fork(lambda t: t * 2, x)
    return torch.jit.wait(future) + 1


@case(x)
def quantised(_: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127)


@case(x)
def a_wrapped_tensor(_: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.Tensor._make_subclass(type("Own", (torch.Tensor,), {}), x)
    return (y * 2).as_subclass(torch.Tensor)


@case(x)
def einsum_and_tensordot(_: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.einsum("ij,kj->ik", x, x) + torch.tensordot(x, x, ([1], [1]))
